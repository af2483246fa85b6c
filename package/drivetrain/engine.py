"""The step: micro-batches in, one update made.

`Engine.train_step` reads from top to bottom what an update is. `prepare`, `backward` and `step` are the same
parts for a loop of your own over any `nn.Module`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import later
from drivetrain.compiling import Compilation, CompileConfig
from drivetrain.data import Everywhere, MicroBatch, Share, Transfer
from drivetrain.declared_metrics import DeclaredMetrics
from drivetrain.distributed.launch import join_job
from drivetrain.distributed.lifetime import ProgramChannel
from drivetrain.distributed.tensors import broadcast_buffers
from drivetrain.generator_step import advance, generator_step
from drivetrain.memory import MemoryConfig, MemoryInUse
from drivetrain.metrics import MetricBuffer, Row, refuse_nonfinite
from drivetrain.micro_batch import MicroBatches
from drivetrain.native import EngineData, engine_data, prepare_module
from drivetrain.options import by_name
from drivetrain.placeholder import Placeholders
from drivetrain.precision import Precision
from drivetrain.progress import Progress
from drivetrain.step_output import StepValues, read_output, without_other_graphs
from drivetrain.strategies import Strategy, StrategyConfig, select_precision, select_strategy
from drivetrain.streams import Streams
from drivetrain.task import StepModule, TaskModule
from drivetrain.types import Batch
from drivetrain.update_gate import UpdateGate
from drivetrain.updates import DEFAULT, Updater, build_updaters, configured_specs, is_interleaved
from drivetrain.weight_updates import WeightUpdates
from drivetrain.window import OpenWindow, StepResult, Weighted, no_loss, weigh


@by_name
class Engine:
    """Device, precision, optimizers and the step.

    Args:
        strategy: A name, a configuration such as `DDPConfig(...)`, or an instance; see
            `drivetrain.strategies`.
        precision: A name or a `Precision`; "auto" for what `accelerate launch` was told, and else "32".
        devices: How many processes, or "auto".
        num_nodes: How many machines.
        seed: Seeds every random stream of the run.
        compile: True, a `CompileConfig`, or a mapping of its options, to compile the task's repeated blocks.
        memory: A `MemoryConfig`, or a mapping of its options: what is traded for memory.

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
        # An object of this engine's own: a module says by it which engine has converted it.
        self.precision = copy.copy(select_precision(precision, strategy=strategy))
        self.strategy = select_strategy(strategy, self.precision, devices, num_nodes)
        self.compilation = Compilation(compile, self.strategy)
        self.memory = MemoryInUse(memory, self.strategy, self.precision, compile)
        join_job(self.strategy.world_size, num_nodes)
        self.strategy.setup()
        self.device = self.strategy.device
        self.ranks, self.data_ranks = self.strategy.ranks, self.strategy.data_ranks
        self.share = Share(self.strategy.data_rank, self.strategy.data_size)  # the part of the data it reads
        self.seed, self.progress = seed, Progress()
        self.streams = Streams(seed, self.strategy.data_rank, self.device)
        self.transfer = Transfer(self.device, self.precision.input_dtype, self.strategy.place)
        self.buffer = MetricBuffer(self.data_ranks)
        self.updaters: dict[str, Updater] = {}
        self.before_optimizer_step: Callable[[], None] | None = None
        self.splitter: MicroBatches | None = None
        self.gate: UpdateGate | None = None
        self.refuse_nonfinite = refuse_nonfinite
        self._scaled = self.precision.loss_scaling
        self._alone = self.ranks.size == 1
        self.sharing = None if self._alone else self.data_ranks  # the ranks that share a window
        self._tells = not self._alone or self.strategy.always_told
        self.placeholders = Placeholders(self.transfer)
        self.passes = 0  # forwards and backwards so far, for whoever watches the run
        self.begins_again = False  # whether an update may be begun again, which must move no metric twice
        self._window = OpenWindow(self.data_ranks)
        self._channel = ProgramChannel(self.ranks, self.progress)
        self.weight_updates = WeightUpdates(self.precision.updates_of_weights, seed, self.progress)
        self.closing = ExitStack()  # what is undone however the engine ends
        self.closing.enter_context(self.precision.running())

    # The task's side: what the Trainer uses.

    def prepare_task(
        self,
        task: TaskModule,
        *,
        training: bool = True,
        total_updates: int | None = None,
        max_grad_norm: float | None = None,
        metrics: DeclaredMetrics | None = None,
    ) -> None:
        """Place the task and, for training, make its optimizers.

        Args:
            task: The task; its parameters are moved in place.
            training: Whether optimizers are needed.
            total_updates: The run's length for schedules, or None when it is not known.
            max_grad_norm: Clipping for optimizers that set none of their own.
            metrics: Declared metrics to update in training, or None.

        Raises:
            ConfigError: The task's optimizers or its step do not fit together.
        """
        self.task = task
        self.step_module = StepModule(task)
        self.closing.callback(self.precision.restore_module, task)
        self.compilation.add(task)
        if training:
            self.memory.add(task)
        self.train_metrics, self.interleaved = metrics or None, is_interleaved(task)
        if not training:
            self.model = self.strategy.prepare(self.step_module, None, self.precision).model
            return
        specs = configured_specs(task, self.strategy, total_updates)

        def make_optimizers(_: nn.Module) -> dict[str, Optimizer]:
            self.updaters = build_updaters(task, specs, total_updates, max_grad_norm, self.weight_updates)
            return {name: updater.optimizer for name, updater in self.updaters.items()}

        self.model = self.strategy.prepare(self.step_module, make_optimizers, self.precision).model
        self.memory.attach_task(self.step_module, self.updaters, self.interleaved, self.progress)
        self.parameters = [p for p in task.parameters() if p.requires_grad]
        for parameter in self.parameters:  # what was left there would count into the first update
            parameter.grad = None
        self._moving = [each for each in self.updaters.values() if each.schedule or each.scheduler]
        self.only_updater = next(iter(self.updaters.values()))
        self._choose_step()

    def split_batches(self, splitter: MicroBatches) -> None:
        """Run batches in parts; the splitter exchanges gradients, and not a wrapper's forward."""
        self.splitter = splitter
        self._choose_step()

    def _choose_step(self) -> None:
        """Choose what runs the task's training step on a micro-batch."""
        sharded = self.strategy.sharded
        step: Callable[..., Any] = advance if self.interleaved else self.task.training_step
        if sharded and not self.interleaved:
            step = without_other_graphs(step, keep_outputs=self.train_metrics is not None)
        self.step_module.use(step)
        # A wrapper's own forward, and a sharded module's hooks, must run. Without them the step is called: no
        # wrapper can follow a generator, whose losses are backpropagated one by one, and a splitter exchanges
        # gradients by itself.
        unwrapped = not sharded and (self.model is self.step_module or self.interleaved)
        run_step: Callable[..., Any] = self.model
        if unwrapped or self.splitter is not None:
            run_step = step if self.step_module.context is None else self.step_module.forward
        self.run_step = run_step

    def set_rates(self) -> None:
        """Set the learning rates of the update that comes next."""
        for updater in self.updaters.values():
            updater.set_rate(self.progress.updates)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Make one update: forward and backward of each micro-batch, then clip, step, zero and schedule.

        The gradient is sum(weight x loss) / sum(weight) over the micro-batches, so that any split of a batch
        gives the same update; see `window.weigh`.
        """
        self.streams.seed_update(self.progress.updates)
        if self.gate is not None:
            self.gate.begin()
        pairs, total = weigh(micro_batches, self.sharing, self.placeholders)
        if self.interleaved:
            return generator_step(self, micro_batches, pairs, total)
        rows, seen = self.accumulate(pairs)
        applied, norm = self.update(self.only_updater, rows, self.parameters) if pairs else (False, None)
        return self.finish(micro_batches, rows, applied, norm, seen, total)

    def accumulate(self, pairs: Weighted) -> tuple[list[Row], list[Any]]:
        """Run forward and backward of each micro-batch.

        Returns:
            The scalars of each, and what the declared metrics are to be shown once the update is made.
        """
        strategy, run_step, placeholders = self.strategy, self.run_step, self.placeholders
        rows: list[Row] = []
        seen: list[Any] = []
        for micro_batch, share in pairs:
            self.passes += 1
            if self._tells:
                strategy.microbatch(self.model, micro_batch is pairs[-1][0])
            batch, stands_in = micro_batch.batch, micro_batch.stand_in
            output = placeholders.forward(self.task, run_step, batch) if stands_in else run_step(batch)
            loss, names, values, outputs = read_output(output)
            if loss is None or values is None or not loss.requires_grad:
                raise no_loss(self.task, loss)
            rows.append((names, values, micro_batch.weight))
            if stands_in:
                placeholders.backward(self.task, strategy, loss, share)
                continue
            strategy.backward(loss, share)
            if self.train_metrics is not None and outputs is not None:
                self.show_metrics(outputs, batch, seen)
        return rows, seen

    def outputs_of(self, batch: Batch) -> Any:
        """Run the training step on a batch for its outputs alone."""
        return read_output(self.run_step(batch))[3]

    def bad_batches(self, micro_batches: Sequence[MicroBatch]) -> int:
        """How many micro-batches of the last update's window could not be made, in all processes."""
        return sum(each.bad for each in micro_batches) if self._alone else self.placeholders.bad

    def show_metrics(self, outputs: Any, batch: Batch, seen: list[Any]) -> None:
        """Show a micro-batch to the declared metrics: now, or once the update is made if it may not be.

        Args:
            outputs: What the task's step gave for them.
            batch: The micro-batch.
            seen: Gets what is to be shown later.
        """
        with torch.no_grad():
            inputs = self.task.metric_inputs(outputs, batch)
        if self._scaled or self.gate or self.begins_again:
            seen.append(inputs)
        else:  # at once, so that one micro-batch's outputs are held, and not those of the whole window
            self.train_metrics.update(inputs)  # type: ignore[union-attr]

    def update(
        self, updater: Updater, rows: Sequence[Row], parameters: Sequence[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """Unscale, clip, step and clear, with the gradients that were added; for every kind of loop.

        Args:
            updater: The optimizer.
            rows: The scalars of its micro-batches.
            parameters: Whose gradients are cleared.

        Returns:
            Whether the update was made, and the gradient's norm before clipping.
        """
        strategy, norm = self.strategy, None
        if self._scaled:
            strategy.unscale(updater.optimizer)
        if self.before_optimizer_step is not None:
            self.before_optimizer_step()
        refused = self.gate is not None and self.gate.refuses(updater, rows)
        if refused:
            strategy.discard(updater.optimizer)
        elif updater.max_grad_norm is not None:
            norm = strategy.clip_grad_norm(updater.parameters, updater.max_grad_norm)
        applied = not refused and strategy.optimizer_step(updater.optimizer)
        # As Optimizer.zero_grad, without its profiling range (6 us).
        for parameter in parameters:
            parameter.grad = None
        if not applied:
            self.placeholders.drop()
            if not refused:
                self.refuse_nonfinite(rows, self.progress.updates, strategy.rank)
        return applied, norm

    def finish(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: list[Row],
        applied: bool,
        norm: Tensor | None,
        seen: list[Any],
        total: Everywhere | None,
    ) -> StepResult:
        """Count an update, whether it was made or skipped, and what it has used; show its metrics."""
        progress, update = self.progress, self.progress.updates
        for micro_batch in micro_batches:
            progress.position += micro_batch.advance
        for counted in micro_batches if total is None else (total,):
            progress.samples += counted.samples
            progress.tokens += counted.tokens
        progress.micro_batches += len(micro_batches)
        progress.epoch_batches += len(micro_batches)
        if not applied:
            progress.skipped += 1
            return StepResult(rows, False, norm, update)
        progress.updates += 1
        progress.epoch_updates += 1
        self.buffer.add(rows, update)
        for inputs in seen:
            self.train_metrics.update(inputs)  # type: ignore[union-attr]
        for updater in self._moving:
            updater.advance(update + 1)
        return StepResult(rows, True, norm, update)

    @contextmanager
    def evaluating(self, stage: str) -> Iterator[None]:
        """Within it the step of "validation", "test" or "predict" is run, without gradients."""
        self.synchronize_buffers()
        with self.step_module.evaluating(getattr(self.task, f"{stage}_step")) as run_step:
            self.evaluate_step = self.model if self.strategy.sharded else run_step
            yield

    def exchanged(self, write: bool = False) -> AbstractContextManager[Mapping[str, Optimizer]]:
        """Within it the task and its optimizers, which it gives, are as checkpoints hold them."""
        self.strategy.settle(self.model)
        optimizers = {name: each.optimizer for name, each in self.updaters.items()}
        return self.strategy.exchanged(optimizers, write)

    def synchronize_buffers(self) -> None:
        """Give all processes rank 0's buffers, which are those that are saved."""
        if not self._alone:
            broadcast_buffers(self.task, self.strategy.world_size)

    def evaluation_step(self, micro_batch: MicroBatch, number: int) -> StepValues:
        """One evaluation batch, the `number`-th of its loader; inside `evaluating`."""
        self.streams.seed_evaluation(number)
        return read_output(self.evaluate_step(micro_batch.batch))

    def __enter__(self) -> Self:
        """The engine, which `with` tears down."""
        return self

    def __exit__(self, *_: object) -> None:
        """Tear it down; the other processes are told of an error."""
        self.teardown()

    def teardown(self) -> None:
        """Release what the strategy took, and leave the task as an ordinary module."""
        with self.closing:
            self._channel.leave(self._release)

    def _release(self) -> None:
        self.compilation.release()
        if sys.exc_info()[0] is None:  # else the other processes may not be there
            self.strategy.restore()
        self.memory.release()
        if hasattr(self, "step_module"):  # and not a wrapper, which holds on to a process group
            self.model = self.run_step = self.evaluate_step = self.step_module
        self.strategy.teardown()

    # A loop of your own.

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    ) -> Any:
        """A module, and an optimizer made from its parameters, for a loop of your own.

        Args:
            model: Any module.
            make_optimizer: Given the list of trainable parameters as the strategy has placed them.

        Returns:
            `model` if no optimizer is wanted, else `(model, optimizer)`. The model's forward runs under the
            precision's context; its state keys are those of the module that was given.
        """
        self._channel.open()
        self.compilation.add(model)
        self.memory.add(model)
        self.closing.callback(self.precision.restore_module, model)
        prepared = prepare_module(self.strategy, model, make_optimizer, self.precision, self.weight_updates)
        self.memory.attach(prepared)
        return (prepared.model, prepared.optimizer) if make_optimizer else prepared.model

    def prepare_data(self, data: Any, *, training: bool = True) -> EngineData:
        """Data whose batches come on the device, from where `progress` stands; see `EngineData`."""
        self._channel.open()
        return engine_data(self, data, training, self._window)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Add a micro-batch's gradient; over the backwards between two steps it is sum(weight x loss) /
        sum(weight).

        Args:
            loss: A scalar.
            weight: What the loss is a mean over, such as its number of samples or tokens. None counts every
                backward alike; with several processes, each by its number of samples.
        """
        self._window.backward(self.strategy, loss, weight)

    def step(self, optimizer: Optimizer, max_grad_norm: float | None = None) -> StepResult:
        """Make an update from the gradients added since the last one, and clear them.

        Args:
            optimizer: What `prepare` gave.
            max_grad_norm: What to clip the gradient's global norm to.

        Raises:
            ConfigError: No backward came before.
        """
        progress, updater = self.progress, Updater(DEFAULT, optimizer, max_grad_norm=max_grad_norm)
        self._window.close(self.strategy, updater.parameters)
        applied, norm = self.update(updater, (), updater.parameters)
        result = StepResult([], applied, norm, progress.updates)
        progress.updates += applied
        progress.skipped += not applied
        self.streams.seed_update(progress.updates)
        return result

    def save(self, path: str, *, model: Any = None, optimizer: Any = None, **state: Any) -> None:
        """Write a checkpoint: weights, optimizer state, progress, and anything else by name.

        Args:
            path: The directory to make; an existing one is refused.
            model: A module, or a mapping of names to modules.
            optimizer: An optimizer, or a mapping of names to optimizers.
            state: Trees of tensors, numbers and texts, or objects with `state_dict`.

        Raises:
            ConfigError: In the middle of a window: gradients without their step are in no checkpoint.
            CheckpointError: It cannot be written, or something in it cannot be stored.
        """
        self._window.check_closed()
        later.save_engine(self, path, model, optimizer, state)

    def load(self, path: str, *, model: Any = None, optimizer: Any = None, **state: Any) -> dict[str, Any]:
        """Read a checkpoint back, after verifying it: into the same things that `save` was given.

        Returns:
            What was saved by name, for those whose given object has no `load_state_dict`.

        Raises:
            CheckpointError: Damaged, missing, or not fitting the model.
        """
        return later.load_engine(self, path, model, optimizer, state)
