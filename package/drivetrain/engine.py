"""The step: micro-batches in, one update made.

`Engine.train_step` reads from top to bottom what an update is. `prepare`, `backward` and `step` are the same
parts for a loop of your own over any `nn.Module`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import later
from drivetrain.compiling import Compilation, CompileConfig
from drivetrain.data import Everywhere, MicroBatch, Share, Transfer
from drivetrain.declared_metrics import DeclaredMetrics
from drivetrain.distributed.launch import join_job
from drivetrain.distributed.lifetime import ProgramChannel
from drivetrain.distributed.tensors import broadcast_buffers
from drivetrain.engine_data import EngineData, engine_data
from drivetrain.generator_step import generator_step
from drivetrain.memory import MemoryConfig, MemoryInUse
from drivetrain.metrics import MetricBuffer, Row, refuse_nonfinite
from drivetrain.micro_batch import MicroBatches
from drivetrain.native import OpenWindow, prepare_module, step_of_own_loop
from drivetrain.options import ByName
from drivetrain.peers import ENGINE_ARGUMENTS
from drivetrain.precision import Precision
from drivetrain.precision_in_use import PrecisionInUse
from drivetrain.progress import Progress
from drivetrain.step_output import StepValues, read_output, without_other_graphs
from drivetrain.strategies import Prepared, Strategy, StrategyConfig, select_precision, select_strategy
from drivetrain.streams import Streams
from drivetrain.task import StepModule, TaskModule
from drivetrain.types import Batch
from drivetrain.update_gate import UpdateGate
from drivetrain.updates import Updater, build_updaters, configured_specs, is_interleaved
from drivetrain.window import Spare, StepResult, advance, keep_for_metrics, no_loss, shared, weighted


class Engine(ByName):
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

    _elsewhere: ClassVar[Mapping[str, str]] = ENGINE_ARGUMENTS

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
        self.precision = select_precision(precision, strategy=strategy)
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
        self._tells = not self._alone or self.strategy.always_told
        self._spare = Spare(self.transfer)
        self._window = OpenWindow(self.data_ranks)
        self._channel = ProgramChannel(self.ranks, self.progress)
        self._in_use = PrecisionInUse(self.precision, seed, self.progress)
        self.closing = ExitStack()  # of what has processes of its own

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
        self._in_use.note(task)
        self.compilation.add(task)
        if training:
            self.memory.add(task)
        self._train_metrics, self._interleaved = metrics or None, is_interleaved(task)
        if not training:
            self._take(self.strategy.prepare(self.step_module, None, self._in_use.precision))
            return
        specs = configured_specs(task, self.strategy, total_updates)

        def make_optimizers(_: nn.Module) -> dict[str, Optimizer]:
            self.updaters = build_updaters(task, specs, total_updates, max_grad_norm, self._in_use.updates)
            return {name: updater.optimizer for name, updater in self.updaters.items()}

        self._take(self.strategy.prepare(self.step_module, make_optimizers, self._in_use.precision))
        self.memory.attach_task(self.step_module, self.updaters, self._interleaved, self.progress)
        self._parameters = [p for p in task.parameters() if p.requires_grad]
        for parameter in self._parameters:  # what was left there would count into the first update
            parameter.grad = None
        self._moving = [each for each in self.updaters.values() if each.schedule or each.scheduler]
        self._only = next(iter(self.updaters.values()))
        self.use_training_step()

    def _take(self, prepared: Prepared) -> None:
        self.model = prepared.model
        # A wrapper's own forward, and a sharded module's hooks, must run; without them, nn.Module's call is 1
        # us for nothing. A generator's losses are backpropagated one by one, which no wrapper can follow.
        sharded = self.strategy.sharded
        plain = not sharded and (self.model is self.step_module or self._interleaved)
        self._run_step = self.step_module.forward if plain else self.model

    def split_batches(self, splitter: MicroBatches) -> None:
        """Run batches in parts; gradients are exchanged by the splitter, and not by a wrapper's forward."""
        self.splitter, self._run_step = splitter, self.step_module.forward

    def use_training_step(self) -> None:
        """Make the model run the task's training step."""
        step: Callable[..., Any] = advance if self._interleaved else self.task.training_step
        if self.strategy.sharded and not self._interleaved:
            step = without_other_graphs(step, keep_outputs=self._train_metrics is not None)
        self.step_module.use(step)

    def set_rates(self) -> None:
        """Set the learning rates of the update that comes next."""
        for updater in self.updaters.values():
            updater.set_rate(self.progress.updates)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One update: forward and backward of each micro-batch, then clip, step, zero and schedule.

        The gradient is sum(weight x loss) / sum(weight) over the micro-batches, so that any split of a batch
        gives the same update. A micro-batch of weight zero has nothing to learn from and is passed over.
        """
        self.streams.seed_update(self.progress.updates)
        if self.gate is not None:
            self.gate.begin()
        total = None
        if self.splitter is not None:
            pairs, total = self.splitter.pairs(micro_batches)
        elif self._alone:
            pairs = weighted(micro_batches)
        else:
            pairs, total = shared(micro_batches, self.data_ranks, self._spare)
        if self._interleaved:
            return generator_step(self, micro_batches, pairs, total)
        strategy, run_step = self.strategy, self._run_step
        rows: list[Row] = []
        seen: list[Any] = []
        for micro_batch, scale in pairs:
            if self._tells:
                strategy.microbatch(self.model, micro_batch is pairs[-1][0])
            if total is not None and micro_batch.everywhere is None:
                micro_batch = self._spare.instead_of(micro_batch)
            if micro_batch.stand_in:
                rows.append(self._spare.run(self, micro_batch, scale))
                continue
            loss, names, values, outputs = read_output(run_step(micro_batch.batch))
            if loss is None or values is None or not loss.requires_grad:
                raise no_loss(self.task, loss)
            strategy.backward(loss, scale)
            rows.append((names, values, micro_batch.weight))
            if self._train_metrics is not None:
                keep_for_metrics(self, outputs, micro_batch.batch, seen)
        learns = bool(pairs) if self.splitter is None else self.splitter.complete(seen)
        applied, norm = self._update(self._only, rows) if learns else (False, None)
        return self._finish(micro_batches, rows, applied, norm, seen, total)

    def _update(self, updater: Updater, rows: Sequence[Row]) -> tuple[bool, Tensor | None]:
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
        # What Optimizer.zero_grad does, without its profiling range (6 us).
        for parameter in self._parameters:
            parameter.grad = None
        if not applied:
            self._spare.drop()
            if not refused:
                self.refuse_nonfinite(rows, self.progress.updates, strategy.rank)
        return applied, norm

    def _finish(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: list[Row],
        applied: bool,
        norm: Tensor | None,
        seen: list[Any],
        total: Everywhere | None,
    ) -> StepResult:
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
            self._train_metrics.update(inputs)  # type: ignore[union-attr]
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

    def predict_step(self, batch: Batch, number: int) -> Any:
        """One batch's predictions, on the device; inside `evaluating("predict")`."""
        self.streams.seed_evaluation(number)
        return self.evaluate_step(batch)

    def __enter__(self) -> Self:
        """The engine, which `with` tears down."""
        return self

    def __exit__(self, *_: object) -> None:
        """Tear it down; the other processes are told of an error."""
        self.teardown()

    def teardown(self) -> None:
        """Release what the strategy took, and leave the task as an ordinary module."""
        with self._in_use, self.closing:
            self._channel.leave(self._release)

    def _release(self) -> None:
        self.compilation.release()
        if sys.exc_info()[0] is None:  # else the other processes may not be there
            self.strategy.restore()
        self.memory.release()
        if hasattr(self, "step_module"):  # and not a wrapper, which holds on to a process group
            self.model = self._run_step = self.evaluate_step = self.step_module
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
        prepared = prepare_module(self.strategy, model, make_optimizer, self._in_use)
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
        """Make an update from the gradients added since the last, and clear them.

        Args:
            optimizer: What `prepare` gave.
            max_grad_norm: What to clip the gradient's global norm to.

        Raises:
            ConfigError: No backward came before.
        """
        return step_of_own_loop(self, self._window, optimizer, max_grad_norm)

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
