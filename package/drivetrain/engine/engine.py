"""One step, made from micro-batches.

`Engine.train_step` shows from top to bottom what a step is. `prepare`, `backward` and `step` are the same
parts for your own loop over any `nn.Module`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.calendar import Calendar
from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import set_rank
from drivetrain.core.progress import Progress
from drivetrain.core.random_streams import Streams
from drivetrain.core.types import Batch
from drivetrain.core.validation import by_name, check_no_class
from drivetrain.data import Feed, GlobalCounts, MicroBatch, Shard, Transfer, as_source, pin_memory_for
from drivetrain.data.consistency import check_data
from drivetrain.distributed.failure.channel import FailureChannel
from drivetrain.distributed.failure.lifetime import ProgramChannel
from drivetrain.distributed.failure.named_locations import named_location
from drivetrain.distributed.launch.programs import join_job
from drivetrain.distributed.tensors import broadcast_buffers
from drivetrain.engine.generator_step import advance, generator_step
from drivetrain.engine.memory import MemoryConfig, check_memory
from drivetrain.engine.metrics.declared import DeclaredMetrics
from drivetrain.engine.metrics.means import MetricBuffer, Row, refuse_nonfinite
from drivetrain.engine.optimizer_modes import OptimizerModes
from drivetrain.engine.own_loop import EngineData, prepare_module
from drivetrain.engine.placeholder import Placeholders
from drivetrain.engine.skip import StepGate
from drivetrain.engine.splitting import MicroBatches
from drivetrain.engine.terms import accumulate_terms
from drivetrain.engine.updater import (
    DEFAULT,
    JointOptimizer,
    Updater,
    build_updaters,
    check_several,
    configured_specs,
    is_interleaved,
    joint_updater,
)
from drivetrain.engine.weighting import OpenWindow, StepResult, Weighted, weigh
from drivetrain.strategies import Strategy, StrategyConfig, select_precision, select_strategy
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.select import check_precision
from drivetrain.strategies.sparse import clip_grad_value
from drivetrain.strategies.transforms.compile import Compilation, CompileConfig
from drivetrain.strategies.transforms.recompute import RecomputeOption, forget, recompute
from drivetrain.task.assigned_loss import is_sum
from drivetrain.task.optim.groups import named_parameters
from drivetrain.task.optim.low_precision import WeightUpdates
from drivetrain.task.optim.state import start_momenta
from drivetrain.task.output import (
    Optimized,
    StepValues,
    TermsFound,
    no_loss,
    read_output,
    without_other_graphs,
)
from drivetrain.task.task import StepModule, TaskModule, assigned_loss, overrides


@by_name
class Engine:
    """Device, precision, optimizers and the step.

    Args:
        strategy: A name, a configuration such as `DDPConfig(...)`, or an instance; see
            `drivetrain.strategies`.
        precision: A name or a `Precision`; "auto" takes it from `accelerate launch`, else "32".
        devices: The number of processes, or "auto"; see `Trainer`.
        num_nodes: The number of machines.
        seed: Seeds every random stream of the run.
        compile: True, a `CompileConfig`, or a mapping of its options, to compile the task's repeated blocks.
        memory: A `MemoryConfig`, or a mapping of its options.

    Raises:
        ConfigError: An unknown strategy or precision; lists the allowed names.
        StrategyError: One that cannot run here.

    Example:
        ```python
        engine = Engine(precision="bf16-mixed")
        model, optimizer = engine.prepare(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        for batch in engine.prepare_data(loader):
            engine.backward(model(batch))
            engine.step(optimizer, max_grad_norm=1.0)
        engine.save("checkpoints/last", model=model, optimizer=optimizer)
        ```
    """

    def __init__(
        self,
        strategy: str | Strategy | StrategyConfig = "auto",
        precision: str | Precision = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        seed: int = 0,
        compile: bool | Mapping[str, Any] | CompileConfig = False,
        memory: Mapping[str, Any] | MemoryConfig | None = None,
    ) -> None:
        check_no_class("Engine(strategy=)", strategy)
        check_no_class("Engine(precision=)", precision)
        # Unique to this engine: a module stores it to show which engine has converted it.
        self.precision = copy.copy(select_precision(precision, strategy=strategy))
        self.strategy = select_strategy(strategy, self.precision, devices, num_nodes)
        self.compilation = Compilation(compile, self.strategy)
        self.memory = check_memory(memory, self.strategy)
        join_job(self.strategy.world_size, num_nodes)
        self.strategy.setup()
        try:
            self._set_up(seed)
        except BaseException:
            self.strategy.teardown()
            raise

    def _set_up(self, seed: int) -> None:
        """Make what an engine has, once the strategy has its device and its ranks."""
        check_precision(self.strategy, self.precision)
        self.device = self.strategy.device
        self.ranks, self.data_ranks = self.strategy.ranks, self.strategy.data_ranks
        set_rank(self.ranks.rank)
        self.shard = Shard(self.strategy.data_rank, self.strategy.data_size)  # this rank's part of the data
        self.seed, self.progress = seed, Progress()
        part, parts = self.strategy.part
        drawing = self.shard.rank * parts + part  # processes with the same one draw the same
        self.streams = Streams(seed, self.shard.rank, self.device, drawing)
        self.transfer = Transfer(self.device, self.precision.input_dtype, self.strategy.place)
        self.buffer = MetricBuffer(self.data_ranks)
        self.updaters: dict[str, Updater] = {}
        self.modes = OptimizerModes((), self.strategy, self.precision)
        self.micro_batch_end: Callable[[Batch, Any], None] | None = None
        self.before_optimizer_step: Callable[[], None] | None = None
        self.splitter: MicroBatches | None = None
        self.gate: StepGate | None = None
        self.refuse_nonfinite = refuse_nonfinite
        self.max_grad_value: float | None = None
        self._scaled = self.precision.loss_scaling
        self._alone = self.ranks.size == 1
        self.sharing = None if self._alone else self.data_ranks  # the ranks that share a window
        self._calls_microbatch = type(self.strategy).microbatch is not Strategy.microbatch
        self.placeholders = Placeholders()
        self.sums = False
        self.media: Mapping[str, Any] | None = None  # of the last micro-batch of a step
        self.passes = 0  # forwards and backwards so far, for watchdogs
        self.begins_again = False  # whether a step may be repeated; that must not update a metric twice
        self._window = OpenWindow(self.data_ranks)
        self._channel = ProgramChannel(self.ranks, self.progress)
        self.channel: FailureChannel | None = None  # that of a Trainer's run on several ranks
        self.weight_updates = WeightUpdates(self.precision.updates_of_weights, seed, self.progress)
        self.closing = ExitStack()  # undone when the engine ends, with or without an error
        self.closing.enter_context(self.precision.process_context())

    # The methods for a task, which the Trainer uses.

    def prepare_task(
        self,
        task: TaskModule,
        *,
        training: bool = True,
        total_steps: int | None = None,
        calendar: Calendar | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        metrics: DeclaredMetrics | None = None,
        micro_batch: int | str | None = None,
        show: bool = False,
    ) -> None:
        """Place the task, choose how its steps run and, for training, make its optimizers.

        Args:
            task: The task; its parameters are moved in place.
            training: Whether optimizers are needed.
            total_steps: The run's length for schedules, or None when it is not known.
            calendar: The calendar of the run, for schedules in epochs and tokens.
            max_grad_norm: The limit of the gradient's norm, for optimizers that set none.
            max_grad_value: Clip each element of the gradients to between minus this and this. It applies to
                optimizers whose gradients are not clipped by norm.
            metrics: Declared metrics to update in training, or None.
            micro_batch: The largest number of samples that a training step runs at once, or "auto"; see
                `MicroBatches`. None runs batches whole.
            show: Whether to print the size that "auto" has found.

        Raises:
            ConfigError: The task's optimizers or its `training_step` do not fit together.
        """
        self.task = task
        self.sums = is_sum(assigned_loss(task))
        self.step_module = StepModule(task)
        self.max_grad_value = max_grad_value
        self._transform(task, self.memory.activation_checkpointing if training else False)
        self.train_metrics, self.interleaved = metrics or None, is_interleaved(task)
        if not training:
            self.model = self.strategy.prepare(self.step_module, None, self.precision).model
            return
        specs = configured_specs(task, self.strategy)

        def make_optimizers(_: nn.Module) -> dict[str, Optimizer]:
            self.updaters = build_updaters(
                task, specs, total_steps, max_grad_norm, self.weight_updates, calendar
            )
            made = {name: updater.optimizer for name, updater in self.updaters.items()}
            self.modes = OptimizerModes(made.values(), self.strategy, self.precision)
            return made

        self.model = self.strategy.prepare(self.step_module, make_optimizers, self.precision).model
        for updater in self.updaters.values():
            start_momenta(updater.optimizer)
        self.trainable = [p for p in task.parameters() if p.requires_grad]
        self.parameters = self.trainable  # without those that `freeze` has frozen for now
        for parameter in self.parameters:  # an old gradient would count into the first step
            parameter.grad = None
        self._moving = [each for each in self.updaters.values() if each.follows_steps]
        self._max_grad_norm = max_grad_norm
        self.optimizer = joint_updater([*self.updaters.values()], max_grad_norm)
        self.splitter = None if micro_batch is None else MicroBatches(micro_batch, self, show)
        self._optimize = self._chosen_optimize()
        check_several(task, [*self.updaters.values()], max_grad_norm, joint=self._optimize is None)
        self._choose_step()

    def _transform(self, model: nn.Module, again: RecomputeOption) -> None:
        """Compile a model's forwards and make its blocks recompute, until the engine ends."""
        self.closing.callback(self.precision.restore_module, model)
        self.closing.callback(forget, model)
        self.compilation.add(model)
        recompute(model, again)

    def _chosen_optimize(self) -> Callable[[Engine, Weighted], Optimized] | None:
        """Return what makes a step, if `train_step` does not: the task, or its training step."""
        if not overrides(self.task, "optimize"):
            return generator_step if self.interleaved else None
        if self.splitter is not None:
            raise ConfigError(
                f"micro_batch with {type(self.task).__name__}.optimize: parts of a batch are run again when"
                " memory runs out, and the task makes its steps itself. Use smaller batches with"
                " gradient_accumulation_steps"
            )
        return self.task.optimize

    def _choose_step(self) -> None:
        """Choose `run_step`, which runs the task's training step on a micro-batch."""
        sharded = self.strategy.sharded
        step: Callable[..., Any] = advance if self.interleaved else self.task.training_step
        if sharded and not self.interleaved:
            keeps = self.train_metrics is not None or self.micro_batch_end is not None
            step = without_other_graphs(step, keep_outputs=keeps)
        self.step_module.use(step)
        # A wrapper's forward and a sharded module's hooks must run. Without them the step is called directly:
        # a wrapper cannot follow a generator, whose losses are backpropagated one by one, and a splitter
        # exchanges gradients itself.
        unwrapped = not sharded and (self.model is self.step_module or self.interleaved)
        run_step: Callable[..., Any] = self.model
        if unwrapped or self.splitter is not None:
            run_step = step if self.step_module.context is None else self.step_module.forward
        self.run_step = self.compilation.marking(run_step)

    def watch_micro_batches(self, watch: Callable[[Batch, Any], None]) -> None:
        """Call a function with the batch and the step's outputs after each micro-batch's backward."""
        self.micro_batch_end = watch
        self._choose_step()

    def freeze(self, names: Collection[str]) -> None:
        """From the next step on, freeze the parameters with these names and train the optimizers' others.

        All ranks call it together, between steps.

        Args:
            names: The parameters' names, without the prefixes of wrappers.
        """
        self.strategy.reshard(self.model)
        trainable = {id(each) for each in self.trainable}
        for each in named_parameters(self.task):
            if id(each.parameter) in trainable:
                each.parameter.requires_grad_(not any(name in names for name in each.names))
        self.parameters = [each for each in self.trainable if each.requires_grad]
        for updater in self.updaters.values():
            updater.leave_out_frozen()
        self.optimizer = joint_updater([*self.updaters.values()], self._max_grad_norm)
        self.model = self.strategy.retrain(self.model)
        self._choose_step()

    def set_rates(self) -> None:
        """Set the learning rates of the next step."""
        for updater in self.updaters.values():
            updater.set_rate(self.progress)

    @named_location("in the step")
    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Make one step: forward and backward of each micro-batch, then clip, step, zero and schedule.

        The step minimises sum(weight x loss) / sum(weight) over the micro-batches, so that any split of a
        batch gives the same step; see `weigh`.
        """
        self.streams.seed_step(self.progress.steps)
        if self.gate is not None:
            self.gate.begin()
        weighted, total = weigh(micro_batches, self.sharing, self.placeholders, self.sums)
        if self._optimize is None:
            values, inputs = self.accumulate(weighted, micro_batches if self._alone else ())
            applied, norm = (
                self.update(self.optimizer, values, self.parameters) if weighted else (False, None)
            )
            return self.finish(micro_batches, values, applied, norm, inputs, total)
        values, applied, norm, given, dropped = self._optimize(self, weighted)
        result = self.finish(micro_batches, values, applied, norm, list(given), total)
        result.step_values = [*values, *dropped]
        return result

    @named_location("in the forward")
    def accumulate(
        self, weighted_batches: Weighted, left_out: Iterable[MicroBatch] = ()
    ) -> tuple[list[Row], list[Any]]:
        """Run forward and backward of each micro-batch.

        Args:
            weighted_batches: The micro-batches with their factors.
            left_out: Micro-batches of the window. Those whose loss has weight zero run last, and only if the
                loss has terms.

        Returns:
            The scalars of each, and the inputs for the declared metrics once the step is made.
        """
        strategy, run_step = self.strategy, self.run_step
        step_values: list[Row] = []
        metric_inputs: list[Any] = []
        self.media = media = None
        left = len(weighted_batches)
        moved = weighted_batches if self.transfer.idle else self.transfer.moving(weighted_batches)
        try:
            for micro_batch, factor in moved:
                self.passes += 1
                left -= 1
                if self._calls_microbatch:
                    strategy.microbatch(self.model, not left)
                if micro_batch.is_placeholder:
                    run = self.placeholders.run
                    step_values.append(run(self.task, strategy, run_step, micro_batch, factor))
                    continue
                loss, names, values, outputs, media, terms = read = read_output(run_step(micro_batch.batch))
                if loss is None or values is None or terms is not None or not loss.requires_grad:
                    raise no_loss(self.task, read)
                step_values.append((names, values, micro_batch.weight))
                strategy.backward(loss, factor)
                if self.train_metrics is not None and outputs is not None:
                    self.show_metrics(outputs, micro_batch.batch, metric_inputs)
                if self.micro_batch_end is not None:
                    self.micro_batch_end(micro_batch.batch, outputs)
        except TermsFound as found:
            return accumulate_terms(self, weighted_batches, left_out, found.read, step_values)
        self.media = media
        return step_values, metric_inputs

    def bad_batches(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Return how many micro-batches of the last window could not be made, on all ranks."""
        return sum(each.bad for each in micro_batches) if self._alone else self.placeholders.bad

    def show_metrics(self, outputs: Any, batch: Batch, metric_inputs: list[Any]) -> None:
        """Update the declared metrics with a micro-batch: now, or after the step if it may be skipped.

        Args:
            outputs: The outputs of the task's `training_step`.
            batch: The micro-batch.
            metric_inputs: Collects the inputs for later.
        """
        with torch.no_grad():
            inputs = self.task.metric_inputs(outputs, batch)
        if self._scaled or self.gate or self.begins_again:
            metric_inputs.append(inputs)
        else:  # at once, so that one micro-batch's outputs are held, and not those of the whole window
            self.train_metrics.update(inputs, self.progress.micro_batches)  # type: ignore[union-attr]

    def update(
        self, updater: Updater, step_values: Sequence[Row], parameters: Sequence[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """Unscale, clip, step and clear, with the accumulated gradients; for every kind of loop.

        Args:
            updater: The optimizer.
            step_values: The scalars of its micro-batches.
            parameters: The parameters whose gradients are cleared.

        Returns:
            Whether the step was made, and the gradient's norm before clipping.
        """
        strategy, norm = self.strategy, None
        if self._scaled:
            strategy.unscale(updater.optimizer)
        if self.before_optimizer_step is not None:
            self.before_optimizer_step()
        refused = self.gate is not None and self.gate.refuses(updater, step_values)
        if refused:
            strategy.discard(updater.optimizer)
        elif updater.max_grad_norm is not None:
            norm = strategy.clip_grad_norm(updater.parameters, updater.max_grad_norm)
        elif self.max_grad_value is not None:
            clip_grad_value(updater.parameters, self.max_grad_value)
        applied = not refused and strategy.optimizer_step(updater.optimizer)
        # As Optimizer.zero_grad does, without its profiling range (6 us).
        for parameter in parameters:
            parameter.grad = None
        if not applied:
            self.placeholders.drop()
            if not refused:
                self.refuse_nonfinite(step_values, self.progress.steps, strategy.rank)
        return applied, norm

    def finish(
        self,
        micro_batches: Sequence[MicroBatch],
        step_values: list[Row],
        applied: bool,
        norm: Tensor | None,
        metric_inputs: list[Any],
        total: GlobalCounts | None,
    ) -> StepResult:
        """Count a step, made or skipped, with its batches; update its metrics."""
        progress, step, before = self.progress, self.progress.steps, self.progress.micro_batches
        for micro_batch in micro_batches:
            progress.position += micro_batch.advance
        for counted in micro_batches if total is None else (total,):
            progress.samples += counted.samples
            progress.tokens += counted.tokens
        progress.micro_batches += len(micro_batches)
        progress.epoch_batches += len(micro_batches)
        if not applied:
            progress.skipped += 1
            for updater in self._moving:  # tokens are counted all the same
                updater.set_rate(progress)
            return StepResult(step_values, False, norm, step)
        progress.steps += 1
        progress.epoch_steps += 1
        self.buffer.add(step_values, step)
        for inputs in metric_inputs:
            self.train_metrics.update(inputs, before)  # type: ignore[union-attr]
        for updater in self._moving:
            updater.advance(progress)
        return StepResult(step_values, True, norm, step)

    @contextmanager
    def evaluating(self, step: Callable[..., Any]) -> Iterator[None]:
        """Run the block with a step of an evaluation or prediction, without gradients."""
        self.synchronize_buffers()
        weights = self.modes.evaluating() if self.modes.optimizers else nullcontext()
        with weights, self.step_module.evaluating(step) as run_step:
            self.evaluate_step = self.compilation.marking(self.model if self.strategy.sharded else run_step)
            yield
            # Forwards without a backward leave parameters gathered. The next forward would compute with
            # those, even if a callback has put back the trained weights.
            self.strategy.reshard(self.model)

    def checkpoint_layout(self, write: bool = False) -> AbstractContextManager[Mapping[str, Optimizer]]:
        """Run the block with the task and the yielded optimizers in the form that checkpoints store."""
        self.strategy.reshard(self.model)
        optimizers = {name: each.optimizer for name, each in self.updaters.items()}
        return self.strategy.checkpoint_layout(optimizers, write)

    def synchronize_buffers(self) -> None:
        """Copy rank 0's buffers, which are the saved ones, to all ranks."""
        if not self._alone:
            broadcast_buffers(self.task, self.strategy.world_size)

    @named_location("in the forward")
    def evaluation_step(self, micro_batch: MicroBatch, number: int) -> StepValues:
        """Run one evaluation batch, the `number`-th of its loader; inside `evaluating`."""
        self.streams.seed_evaluation(number)
        return read_output(self.evaluate_step(micro_batch.batch))

    def __enter__(self) -> Self:
        """Return the engine; `with` tears it down."""
        return self

    def __exit__(self, *_: object) -> None:
        """Tear the engine down, and report an error to the other ranks."""
        self.teardown()

    def teardown(self) -> None:
        """Release the strategy's resources, and leave the task as an ordinary module."""
        with self.closing:
            self._channel.leave(self._release)

    def _release(self) -> None:
        self.compilation.release()
        if sys.exc_info()[0] is None:  # after an error the other ranks may be gone
            self.strategy.restore()
        if hasattr(self, "step_module"):  # and not a wrapper, which holds on to a process group
            self.model = self.run_step = self.evaluate_step = self.step_module
        self.strategy.teardown()

    # The methods for your own loop.

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    ) -> Any:
        """Prepare a module, and an optimizer made from its parameters, for your own loop.

        Args:
            model: Any module.
            make_optimizer: Called with the list of trainable parameters as the strategy has placed them.

        Returns:
            `model` without `make_optimizer`, else `(model, optimizer)`. The model's forward runs under the
            precision's context; its state keys are those of the original module.
        """
        self._channel.open()
        self._transform(model, self.memory.activation_checkpointing)
        prepared = prepare_module(self.strategy, model, make_optimizer, self.precision, self.weight_updates)
        self._window.optimizers += prepared.optimizers.values()
        return (prepared.model, prepared.optimizer) if make_optimizer else prepared.model

    def prepare_data(self, data: Any, *, training: bool = True) -> EngineData:
        """Return data whose batches are on the device, starting at `progress`; see `EngineData`."""
        self._channel.open()
        source = as_source(
            data,
            "training" if training else "evaluation",
            self.seed,
            divides=training,
            pin_memory=pin_memory_for(self.device),
            shard=self.shard,
            ranks=self.data_ranks,
        )
        feed = Feed(source, self.transfer)
        if training:  # evaluation data may be read by one rank alone
            check_data([feed], self.ranks)
        return EngineData(self.progress, feed, training, self.streams, self._window)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Add a micro-batch's gradient. A step has the gradient of sum(weight x loss) / sum(weight).

        Args:
            loss: A scalar.
            weight: The number of samples or tokens that the loss is a mean over. None gives every backward
                the same weight on one rank, and its number of samples on several ranks.
        """
        self._window.backward(self.strategy, loss, weight)

    def step(
        self, optimizer: Optimizer | Sequence[Optimizer], max_grad_norm: float | None = None
    ) -> StepResult:
        """Make a step from the gradients added since the last one, and clear them.

        After a step of one optimizer, another may make a step from the same backwards. The next backward
        begins anew: it drops the gradients that a loss has left in the parameters of other optimizers.

        Args:
            optimizer: The optimizer from `prepare`, or several that step together.
            max_grad_norm: The limit of the gradient's global norm; None disables clipping.

        Raises:
            ConfigError: No backward came before, or the optimizer has made its step from them already.
        """
        progress = self.progress
        if not isinstance(optimizer, Optimizer):
            optimizer = JointOptimizer(optimizer)
        self._window.close(self.strategy, optimizer, apart=not self._scaled)
        updater = Updater(DEFAULT, optimizer, max_grad_norm=max_grad_norm)
        applied, norm = self.update(updater, (), updater.parameters)
        result = StepResult([], applied, norm, progress.steps)
        if not progress.steps:
            self.ranks.compare_calls()  # compares the calls of the first step
        progress.steps += applied
        progress.skipped += not applied
        self.streams.seed_step(progress.steps)
        return result

    def save(self, path: str, *, model: Any = None, optimizer: Any = None, **state: Any) -> None:
        """Write a checkpoint: weights, optimizer state, progress, and anything else by name.

        Args:
            path: The directory to make; an existing one is refused.
            model: A module, or a mapping of names to modules.
            optimizer: An optimizer, or a mapping of names to optimizers.
            state: Trees of tensors, numbers and texts, or objects with `state_dict`.

        Raises:
            ConfigError: In the middle of a window: a checkpoint cannot hold gradients without their step.
            CheckpointError: It cannot be written, or something in it cannot be stored.
        """
        from drivetrain.engine.own_loop_checkpoint import save_own_loop

        self._window.check_closed()
        save_own_loop(self.strategy, self.progress, path, model, optimizer, state)

    def load(self, path: str, *, model: Any = None, optimizer: Any = None, **state: Any) -> dict[str, Any]:
        """Read and verify a checkpoint, and restore the objects that `save` was given.

        Returns:
            The saved values by name, for names whose given object has no `load_state_dict`.

        Raises:
            CheckpointError: Damaged, missing, or not fitting the model.
        """
        from drivetrain.engine.own_loop_checkpoint import load_own_loop

        self._window.handed = None
        return load_own_loop(self.strategy, self.progress, self.streams, path, model, optimizer, state)
