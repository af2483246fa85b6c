"""The Trainer: validated arguments, and the verbs that turn them into runs."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from drivetrain import later
from drivetrain.arguments import (
    check_callbacks,
    check_run_dir,
    checked_callbacks,
    checkpoint_policy,
    plain,
)
from drivetrain.assembly import build_evaluation, build_fit, build_prediction, check_settings, start_from
from drivetrain.boundary import boundary, left_with_program
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.compiling import CompileConfig, check_compile
from drivetrain.distributed.environment import detect
from drivetrain.distributed.launch import rerun_obstacle
from drivetrain.loggers.base import check_loggers
from drivetrain.loop import evaluate, predict, train_steps
from drivetrain.memory import MemoryConfig, check_trainer_memory
from drivetrain.micro_batch import check_micro_batch
from drivetrain.nonfinite import check_on_nonfinite
from drivetrain.observing import observed_evaluation, observed_fit, observed_loop
from drivetrain.options import by_name, count, duration, flag, number, one_of
from drivetrain.paths import as_given
from drivetrain.precision import Precision, as_precision
from drivetrain.preemption import Preemption, PreemptionConfig, as_preemption
from drivetrain.progress import Progress
from drivetrain.strategies import Strategy, StrategyConfig, select_precision, select_strategy
from drivetrain.task import TaskModule
from drivetrain.types import Every, Logger
from drivetrain.window import StepResult

if TYPE_CHECKING:
    from drivetrain.plan import Plan

T = TypeVar("T")

Interval = str | int | float | timedelta | Every
"""What stands for an interval: "500 steps", "1 epoch", "10 minutes", a number of steps."""


@dataclass(frozen=True)
class FitResult:
    """What a finished fit leaves.

    Attributes:
        metrics: The latest value of every logged name.
        progress: The counts at the end.
        stop_reason: Why training ended.
        run_dir: Where files went, or None when none were asked for.
        last_checkpoint: The newest checkpoint, or None.
        best_checkpoint: The best keeper, or None.
        model_path: The file of the finished weights, or None.
    """

    metrics: dict[str, float]
    progress: Progress
    stop_reason: str
    run_dir: Path | None
    last_checkpoint: str | None
    best_checkpoint: str | None
    model_path: str | None


@by_name
@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How to run a task: validated when it is made, never changed afterwards. Every verb builds a run of its
    own.

    Attributes:
        max_epochs: Passes over the training data; one of the three limits must be given to train.
        max_steps: Optimizer updates.
        max_time: Wall time over all restarts: "2 hours", seconds, or a timedelta.
        strategy: Where it runs: "auto", "cpu", "cuda", "mps", "ddp", a configuration such as
            `DDPConfig(...)`, an instance, or another package's name; see `drivetrain strategies`.
        devices: How many processes, or "auto".
        num_nodes: How many machines.
        precision: "32", "tf32", "bf16-mixed", "16-mixed", "fp8", "bf16-true", "16-true", "64", or a
            `Precision`; "auto" for what `accelerate launch` was told, or an Accelerator has, and else "32".
        gradient_accumulation_steps: Micro-batches per update.
        max_grad_norm: Clip the gradient's global norm to this; None for no clipping.
        micro_batch: Samples of a batch that are run at once: a number, "auto" for half as many whenever
            memory runs out, or None for all. The batch of an update stays what it is.
        validate_every: When to validate during a fit, which validates at its end if it has not before; None
            for never.
        log_every: When to log.
        checkpoint: True for the default policy (with named validation loaders the first one's loss ranks),
            "async" for the same in the background, False for none, or a `CheckpointConfig`.
        callbacks: Objects with hooks; see `drivetrain.callbacks.Callback`.
        loggers: Names ("tensorboard", "csv", "jsonl") or instances; `()` for none.
        progress_bar: Show progress, and a table of the task before training.
        train_metrics: Whether declared metrics are updated in training too.
        compile: True, or a `CompileConfig`, to run the task's repeated blocks in compiled form.
        memory: A `MemoryConfig`, or a mapping of its options: what is computed again in backward, kept in the
            host's memory, or freed early.
        seed: Seeds the order of the data and every random stream of a run.
        deterministic: Insist on deterministic kernels while a run lasts.
        on_bad_batch: What to do with a training batch that the data raises for: "raise", or "skip" to leave
            it out, say so and count it in `progress.bad_batches`, as long as they are few.
        on_save_error: What to do when a checkpoint or a log cannot be written: "raise", or "warn" to go on,
            say what was not saved, and try again when the next one is due. A run whose end cannot be saved
            raises in any case.
        hang_timeout: Seconds, a timedelta, or "10 minutes", without progress after which all processes are
            ended with exit code 75 and their stacks, naming the rank that is behind; None disables it.
            Compiling, saving and loading have an hour more.
        on_nonfinite: What becomes of a run with a loss that is NaN or infinite: "raise", at the next log
            point; "skip" leaves out each update with such a loss or gradient; "stop" ends the run in order. A
            loss of a validation, or a metric of `EarlyStopping`, that is not finite: "raise" and "stop" end
            the run after a save, "skip" goes on with a warning.
        preemption: Whether signals such as SIGTERM and SIGINT end a fit in order, saved and with an exit code
            that says so; or a `PreemptionConfig`, or a mapping of its options.
        batch_size: For data given as a bare Dataset.
        num_workers: Worker processes for data given as a bare Dataset.
        limit_train_batches: At most this many micro-batches an epoch.
        limit_validation_batches, limit_test_batches, limit_predict_batches: At most this many batches of each
            loader.
        run_dir: Where checkpoints, logs and the ledger of what the time went to are kept; None makes a new
            `runs/<task>-<time>` for every fit that writes.

    Raises:
        ConfigError: A value that is not allowed; says what is.
        StrategyError: A strategy, number of devices or precision that cannot run here.
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    max_time: str | float | timedelta | None = None
    strategy: str | Strategy | StrategyConfig = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    precision: str | int | Precision = "auto"
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    micro_batch: int | str | None = None
    validate_every: Interval | None = "1 epoch"
    log_every: Interval | None = "50 steps"
    checkpoint: bool | str | CheckpointConfig = True
    callbacks: Sequence[Any] = ()
    loggers: str | Logger | Sequence[str | Logger] = ("tensorboard", "csv")
    progress_bar: bool = True
    train_metrics: bool = True
    compile: bool | Mapping[str, Any] | CompileConfig = False
    memory: Mapping[str, Any] | MemoryConfig | None = None
    seed: int = 0
    deterministic: bool = False
    on_bad_batch: str = "raise"
    on_save_error: str = "raise"
    hang_timeout: str | float | timedelta | None = 600.0
    on_nonfinite: str = "raise"
    preemption: bool | Mapping[str, Any] | PreemptionConfig = True
    batch_size: int | None = None
    num_workers: int = 0
    limit_train_batches: int | None = None
    limit_validation_batches: int | None = None
    limit_test_batches: int | None = None
    limit_predict_batches: int | None = None
    run_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check every argument, and normalise intervals, so that nothing fails later that could fail here."""
        for name in ("max_epochs", "max_steps", "batch_size", *(f"limit_{s}_batches" for s in _LIMITED)):
            if getattr(self, name) is not None:
                count(name, getattr(self, name), at_least=1)
        count("gradient_accumulation_steps", self.gradient_accumulation_steps, at_least=1)
        count("num_workers", self.num_workers)
        count("seed", self.seed)
        if self.max_grad_norm is not None:
            number("max_grad_norm", self.max_grad_norm, above=0)
        for name in ("max_time", "hang_timeout"):
            object.__setattr__(self, name, duration(name, getattr(self, name)))
        for name in ("validate_every", "log_every"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Every(getattr(self, name)))
        for name in ("progress_bar", "train_metrics", "deterministic"):
            flag(name, getattr(self, name))
        one_of("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        one_of("on_save_error", self.on_save_error, ("raise", "warn"))
        check_run_dir(self.run_dir)
        chosen = select_precision(self.precision, strategy=self.strategy)
        object.__setattr__(self, "precision", chosen)
        object.__setattr__(self, "checkpoint", checkpoint_policy(self.checkpoint))
        object.__setattr__(self, "callbacks", checked_callbacks(self.callbacks))
        as_preemption(self.preemption)
        check_loggers(self.loggers)
        strategy = self.select_strategy()
        check_compile(self.compile, strategy)
        check_micro_batch(self.micro_batch, strategy)
        check_on_nonfinite(self.on_nonfinite, strategy)
        check_settings(self, strategy, self.batch_size)
        check_trainer_memory(self, strategy)
        check_callbacks(self, strategy)

    def select_strategy(self) -> Strategy:
        """The strategy that a run would use.

        Raises:
            ConfigError: An unknown name.
            StrategyError: It cannot run here.
        """
        return select_strategy(self.strategy, as_precision(self.precision), self.devices, self.num_nodes)

    def to_json(self) -> dict[str, Any]:
        """All arguments, for a log; objects are given by their text."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @by_name
    def fit(
        self, task: TaskModule, train_data: Any, validation_data: Any = None, *, resume: str | None = None
    ) -> FitResult:
        """Train.

        Args:
            task: What to train; its parameters are trained in place.
            train_data: A DataLoader, a Dataset, an iterable of batches, or an object with `train_data()`.
            validation_data: The same, or a mapping of named loaders; None for none.
            resume: "auto" for the newest good checkpoint of `run_dir` or a fresh start, a path to resume from
                there, None for a fresh start.

        Raises:
            ConfigError: Arguments, task and data do not fit together.
            DataError: The data is empty, of an unknown kind, or raised; names the batch.
            CheckpointError: A checkpoint cannot be read, fitted or written.
            NonFiniteError: A loss was NaN or infinite.
            Preempted: A signal has ended the run in order; the program ends with exit code 75.
            KeyboardInterrupt: Likewise by Ctrl-C; once more ends it at once.
        """
        if self._has_to_fork():
            return self._forked(lambda: self.fit(task, train_data, validation_data, resume=resume))
        trainer, resume = observed_fit(self, task, (train_data, validation_data), resume)
        with Preemption(self.preemption) as preemption:
            run, saver = build_fit(trainer, task, train_data, validation_data, resume)
            with boundary(trainer, run):
                start_from(trainer, run, saver, resume)
                preemption.attach(run)
                for _ in train_steps(run):
                    pass
        best = saver.manager.best() if saver else None
        directory = run.run_dir if run.run_dir is not None and run.run_dir.exists() else None
        weights = saver.weights if saver and run.nonfinite.spoiled is None else None
        assert run.stop_reason is not None
        last, best, weights = (as_given(trainer, path) for path in (run.last_checkpoint, best, weights))
        return FitResult(
            dict(run.metrics),
            run.progress,
            run.stop_reason,
            None if directory is None else Path(as_given(trainer, str(directory)) or directory),
            last,
            best,
            weights,
        )

    @by_name
    def steps(
        self, task: TaskModule, train_data: Any, validation_data: Any = None, *, resume: str | None = None
    ) -> Generator[StepResult, None, None]:
        """`fit` as a generator: yields after every update, for a loop body of one's own.

        What the body does is seen by the validation and the checkpoint of the same update. Leaving the loop
        ends the run in order. Of several ranks one may leave it alone: it then makes with the others the
        update that they have begun, if they have, and the loops of all end. Arguments and errors are those of
        `fit`.
        """
        return left_with_program(self._steps(task, train_data, validation_data, resume))

    def _steps(
        self, task: TaskModule, train_data: Any, validation_data: Any, resume: str | None
    ) -> Generator[StepResult, None, None]:
        trainer, resume = observed_fit(self, task, (train_data, validation_data), resume)
        with Preemption(self.preemption) as preemption:
            run, saver = build_fit(trainer, task, train_data, validation_data, resume, body=True)
            with boundary(trainer, run):
                start_from(trainer, run, saver, resume)
                preemption.attach(run)
                run.loop = train_steps(run)
                try:
                    yield from observed_loop(run.loop)
                finally:
                    run.loop = None

    @by_name
    def validate(self, task: TaskModule, data: Any, *, checkpoint: str | None = None) -> dict[str, float]:
        """Evaluate on validation data; every sample counts once.

        Args:
            task: The task.
            data: As in `fit`, or an object with `validation_data()`.
            checkpoint: Weights to load first: a path, or "best" or "last" of `run_dir`.

        Returns:
            Values by name: `validation/loss`, `validation/accuracy`, with named loaders
            `validation/<loader>/loss`.
        """
        return self._evaluate("validation", task, data, checkpoint)

    @by_name
    def test(self, task: TaskModule, data: Any, *, checkpoint: str | None = None) -> dict[str, float]:
        """Evaluate on test data; as `validate`, with names that begin with `test/`."""
        return self._evaluate("test", task, data, checkpoint)

    def _evaluate(self, stage: str, task: TaskModule, data: Any, checkpoint: str | None) -> dict[str, float]:
        if self._has_to_fork():
            return self._forked(lambda: self._evaluate(stage, task, data, checkpoint))
        trainer = observed_evaluation(self)
        run = build_evaluation(trainer, task, data, stage, checkpoint)
        with boundary(trainer, run):
            return evaluate(run, stage, run.evaluation_feeds)

    @by_name
    def predict(
        self,
        task: TaskModule,
        data: Any,
        *,
        checkpoint: str | None = None,
        save_to: str | os.PathLike[str] | None = None,
    ) -> Any:
        """The outputs of `predict_step` for every batch, on the CPU, in the order of the dataset.

        Args:
            task: The task.
            data: As in `fit`, or an object with `predict_data()`.
            checkpoint: As in `validate`.
            save_to: A directory to stream the outputs to, one file a batch, so that memory stays flat.

        Returns:
            A list with the outputs of each batch, or, with `save_to`, the list of files.
        """
        if self._has_to_fork():
            return self._forked(lambda: self.predict(task, data, checkpoint=checkpoint, save_to=save_to))
        trainer = observed_evaluation(self)
        run = build_prediction(trainer, task, data, checkpoint)
        # Closed at once even when writing fails: a suspended pass would leave gradients off for its caller.
        with boundary(trainer, run), closing(predict(run, run.evaluation_feeds[0][1])) as outputs:
            if save_to is None:
                return list(outputs)
            return later.write_predictions(outputs, Path(save_to), run.engine.ranks)

    def _has_to_fork(self) -> bool:
        """Whether the other ranks are to be copied from this process: where the engine cannot start them by
        running the program again, as in a notebook.
        """
        if self.select_strategy().world_size == 1 or self.num_nodes > 1 or torch.distributed.is_initialized():
            return False
        return detect(os.environ) is None and rerun_obstacle() is not None

    def _forked(self, act: Callable[[], T]) -> T:
        """Do something as every rank, in copies of this process, and leave nothing of it behind."""

        def act_and_leave() -> T:
            try:
                return act()
            finally:
                later.disband()

        gc.collect()  # what is left of an earlier run's process group must not be met by the copies
        return later.fork_ranks(act_and_leave, self.select_strategy().world_size)

    @by_name
    def plan(self, task: TaskModule, train_data: Any, validation_data: Any = None) -> Plan:
        """What a fit would do, without training: updates, rates, intervals, memory, and warnings of
        conflicts.

        Prints the plan and returns it. Arguments and errors are those of `fit`.
        """
        plan = later.make_plan(self, task, train_data, validation_data)
        print(plan)
        return plan


_LIMITED = ("train", "validation", "test", "predict")
