"""The run: everything that one fit, validation, test or prediction consists of. Built fresh each time, seen
by callbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drivetrain import later
from drivetrain.data import Feed
from drivetrain.declared_metrics import DeclaredMetrics, joined
from drivetrain.distributed.stopping import Stopping
from drivetrain.engine import Engine
from drivetrain.errors import CheckpointError, ConfigError, NonFiniteError
from drivetrain.hooks import Hooks
from drivetrain.ledger import Ledger
from drivetrain.module_state import clean_names
from drivetrain.nonfinite import NonFinitePolicy
from drivetrain.save_errors import LEFT_OUT, SaveErrors, words_of
from drivetrain.streams import load_host_state, shielded
from drivetrain.task import TaskModule
from drivetrain.types import Logger, Trigger
from drivetrain.updates import check_trained
from drivetrain.window import StepResult

if TYPE_CHECKING:
    from drivetrain.checkpoint.format import Snapshot


@dataclass
class Totals:
    """What is planned; None where it is not known beforehand.

    Attributes:
        updates: Updates in the whole run.
        epochs: Epochs in the whole run.
        updates_per_epoch: Updates in an epoch.
        max_updates: The limit that was set, if one was.
        max_seconds: The limit of wall time, if one was set.
    """

    updates: int | None = None
    epochs: int | None = None
    updates_per_epoch: int | None = None
    max_updates: int | None = None
    max_seconds: float | None = None


@dataclass
class Evaluation:
    """Where an evaluation or prediction is.

    Attributes:
        loader: The loader's name; None for an only one.
        batch: The batch, from 0.
        batches: Of how many; None when that is not known.
        values: What it gave, by full name, once it has ended.
    """

    loader: str | None = None
    batch: int = 0
    batches: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Triggers:
    """When to log and when to validate."""

    log: Trigger = field(default_factory=lambda: Trigger(None))
    validate: Trigger = field(default_factory=lambda: Trigger(None))


class Run:
    """One run in progress; loops and callbacks are given it.

    Attributes:
        task: The task.
        engine: The engine: device, strategy, precision, optimizers.
        progress: Where the run is.
        stage: "train", "validation", "test" or "predict".
        totals: What is planned.
        metrics: The latest value of every logged name.
        logged: What the current log point logs.
        latest: What was logged after the update `latest_at`, by one log point or several.
        latest_at: The last update, in this program, after which anything was logged; -1 before that.
        run_dir: Where files go, or None.
        nonfinite: The policy for losses, weights and validations that are NaN or infinite.
        is_main: Whether this is rank 0.
        step: The last update's result, or None before the first.
        window: The window being trained on, or None.
        evaluation: Where the evaluation is.
        timing: Seconds spent so far on "data", "compute", "evaluation" and "save"; and, where the task is
            compiled, on "compile".
        ledger: Where all of its time is written down.
        stop_reason: Why the run stops, or None.
        stopping: How the ranks agree on that.
        exception: What ended the run, for `on_exception`.
        validated: Whether the fit has validated, before a resume perhaps.
        failure: The error that the run raises once it has ended in order, or None.
        last_checkpoint: The address of the last checkpoint saved or loaded, or None.
        save_errors: What could not be written so far, and whether it goes on without it.
        milestones: How many checkpoints it has saved, and passes over evaluation data and updates begun.
        reports: How often `report_progress` was called.
        loop: The updates of a fit whose loop has a body of the program's; None for any other run.
        origin: The time, on `perf_counter`'s clock, at which `progress.seconds` was zero.
        host_streams: The states of the host's generators that a checkpoint brought, or None.
        by_time: Whether anything is due by time, so that all ranks must have the same.
        callbacks: All callbacks, in order.
        loggers: All loggers.
    """

    def __init__(
        self,
        task: TaskModule,
        engine: Engine,
        *,
        stage: str,
        callbacks: Sequence[Any] = (),
        loggers: Sequence[Logger] = (),
        run_dir: Path | None = None,
        totals: Totals | None = None,
        triggers: Triggers | None = None,
        train_feed: Feed | None = None,
        evaluation_feeds: Sequence[tuple[str | None, Feed]] = (),
        train_metrics: DeclaredMetrics | None = None,
        evaluation_metrics: DeclaredMetrics | None = None,
        on_save_error: str = "raise",
    ) -> None:
        self.task = task
        self.engine = engine
        self.progress = engine.progress
        self.stage = stage
        self.callbacks = tuple(callbacks)
        self.loggers = tuple(loggers)
        self.hooks = Hooks(self.callbacks)
        self.run_dir = run_dir
        self.totals = totals or Totals()
        self.triggers = triggers or Triggers()
        self.train_feed = train_feed
        self.evaluation_feeds = tuple(evaluation_feeds)
        self.train_metrics = train_metrics
        self.evaluation_metrics = evaluation_metrics
        self.metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.latest_at = -1
        self.nonfinite = NonFinitePolicy(self)
        self.is_main = engine.strategy.rank == 0
        self.save_errors = SaveErrors(on_save_error, tells=self.is_main)
        self.step: StepResult | None = None
        self.window: Any = None
        self.evaluation = Evaluation()
        self.timing = {"data": 0.0, "compute": 0.0, "evaluation": 0.0, "save": 0.0}
        self.ledger = Ledger(self)
        self.stop_reason: str | None = None
        self.stopping = Stopping()
        self.exception: BaseException | None = None
        self.validated = False
        self.failure: Exception | None = None
        self.last_checkpoint: str | None = None
        self.milestones = self.reports = 0
        self.hook: Any = None  # the hook of a callback that is called now, for whoever watches the run
        self.loop: Generator[StepResult, None, None] | None = None
        self.host_streams: dict[str, Any] | None = None
        self.by_time = self.totals.max_seconds is not None or any(
            each.every is not None and each.every.seconds is not None
            for each in (self.triggers.log, self.triggers.validate)
        )
        self._values: dict[str, float] = {}
        self._logging = False
        self.origin = perf_counter()

    def stop(self, reason: str) -> None:
        """End the run after the current update; the first reason is kept.

        One rank may ask alone: all stop after the same update, the first that none of them has ended, with
        its reason. Until they have agreed on that, `stop_reason` stays None.
        """
        if self.stop_reason is None and self.stopping.shared:
            self.stopping.ask(reason)
        else:
            self.stop_reason = self.stop_reason or reason

    def fail(self, error: Exception) -> None:
        """End the run after the current update, saved as one that stops, and then raise an error.

        For an error that all ranks have together, and that no trained weight is to be lost for. The first is
        kept.
        """
        if self.failure is None:
            self.failure = error
            self.stopping.in_vain = True
            self.stop(str(error))

    def report_progress(self) -> None:
        """Report that a hook which takes long is not stuck: `Trainer(hang_timeout=...)` counts anew."""
        self.reports += 1

    @property
    def is_suspended(self) -> bool:
        """Whether the body of the program's own loop runs, or nothing does."""
        return self.loop is not None and inspect.getgeneratorstate(self.loop) == inspect.GEN_SUSPENDED

    def end_if_asked(self) -> None:
        """At the end of training: nothing, unless a signal has ended it. A loss that is NaN goes before one
        after which the program would be started again.

        Raises:
            Preempted: The program is to be started again.
            KeyboardInterrupt: It is to stop.
        """
        reason = self.stop_reason
        if reason is not None and reason in self.stopping.signals:
            failure = None if self.failure is None else str(self.failure)
            self.stop_reason = self.stopping.end(reason, self.nonfinite.reason or failure)

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a number, or a tensor with one, to the next log point; inside `on_log`, to the current one.

        What was computed from sharded tensors is put together first: such a value all ranks log together.

        Raises:
            ConfigError: A tensor with more than one number.
        """
        if isinstance(value, Tensor):
            value = self.engine.strategy.full_tensor(value).detach()
            if value.numel() != 1:
                raise ConfigError(
                    f"run.log({name!r}, ...) takes one number, not a tensor of shape {tuple(value.shape)}."
                    " Log its mean, or each of its numbers under a name of its own"
                )
        (self.logged if self._logging else self._values)[name] = float(value)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which each rank may have a part, such as a parameter of the task; any other
        tensor itself. Called by all ranks together, and not changed in place: it may be the parameter.
        """
        return self.engine.strategy.full_tensor(tensor)

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Gather a state dict with whole tensors, on the CPU and on rank 0 only, under any strategy.

        Called by all ranks together, in any hook. It gives what other programs expect of a model, such as
        `model.save_pretrained(path, state_dict=state)`.

        Args:
            module: The task or a module in it; None for the task.

        Returns:
            Copies of the tensors under the names of the module's own state dict, without what wrapping adds
            to them; tied ones are one tensor. On all ranks but the first, an empty dict.
        """
        module = self.task if module is None else module
        strategy, first = self.engine.strategy, self.engine.ranks.rank == 0
        whole: dict[int, Tensor | None] = {}  # by the id of what is gathered once though it has several names
        with self.engine.exchanged():
            state = module.state_dict(keep_vars=True)
            names = clean_names(state, type(module).__name__)
            for tensor in state.values():
                if isinstance(tensor, Tensor) and id(tensor) not in whole:
                    gathered = strategy.full_tensor(tensor).detach()
                    whole[id(tensor)] = gathered.to("cpu", copy=True) if first else None
        found = {name: whole.get(id(state[given])) for name, given in names.items()}
        return {name: each for name, each in found.items() if each is not None}

    def learning_rates(self) -> dict[str, float]:
        """The learning rates now: "lr", with the optimizer's name or the group's number where there are
        several.
        """
        rates: dict[str, float] = {}
        for updater in self.engine.updaters.values():
            rates.update(updater.rates())
        return rates

    def call(self, hooks: Iterable[Any]) -> None:
        """Call hooks in order."""
        for hook in hooks:
            outer, self.hook = self.hook, hook
            hook(self)
            self.hook = outer

    def check_parameters(self) -> None:
        """See that the task trains what it did when the run began; a walk, so not for every step.

        Raises:
            ConfigError: A parameter was added, replaced or unfrozen since; names it.
        """
        engine = self.engine
        check_trained(self.task, engine.parameters, lambda: engine.strategy.settle(engine.model))

    # Log points.

    def log_training(self) -> None:
        """A log point of training: means since the last one, declared metrics, and what callbacks add.

        Nothing is logged where the run was taken back to an earlier state, or is ended for a loss.

        Raises:
            NonFiniteError: A loss was NaN or infinite.
            ConfigError: The task has got a parameter that is not trained.
        """
        self.check_parameters()
        if self.nonfinite.rolls_back() or self.nonfinite.spoiled:
            return
        try:
            means = self.engine.buffer.means(beside=self._values)
        except NonFiniteError as error:
            self.nonfinite.end(error)
            return
        if self.nonfinite.choice == "skip":
            means["skipped_updates"] = float(self.progress.skipped)
        self.engine.buffer.reset()
        if self.train_metrics:
            means = joined(means, self.train_metrics.compute())
            self.train_metrics.reset()
        values = {f"train/{name}": value for name, value in means.items()}
        if self.train_feed is not None and self.train_feed.leaves_out_bad:
            values["train/bad_batches"] = float(self.progress.bad_batches)
        if values or self._values:
            self.log_point(values, agreed=True)

    def log_point(self, values: Mapping[str, float], agreed: bool = False) -> None:
        """Publish values: into `metrics`, to the callbacks, then to the loggers.

        Args:
            values: By name.
            agreed: Whether all ranks have the same, and have given the same to `log`.
        """
        # What one rank measured of itself, its speed for example, must not make it decide by itself.
        logged = {**self._values, **values}
        self.logged = logged if agreed else self.engine.ranks.first(lambda: logged)
        self._values = {}
        self._logging = True
        try:
            self._note_logged()
            if self.hooks.on_log or self.loggers:
                self._publish()
        finally:
            self._logging = False
        self.ledger.note_alive()

    def _note_logged(self) -> None:
        self.metrics.update(self.logged)
        if self.latest_at != self.progress.updates:
            self.latest, self.latest_at = {}, self.progress.updates
        self.latest.update(self.logged)

    def _publish(self) -> None:
        with shielded():
            self.call(self.hooks.on_log)
            if self.hooks.on_log:  # the same on all ranks, unlike loggers
                self.logged = self.engine.ranks.first(lambda: self.logged)
                self._note_logged()
            for logger in self.loggers if self.is_main else ():
                with self.logging_to(logger, f"what {type(logger).__name__} logs at update"):
                    logger.log_metrics(self.logged, self.progress.updates)

    @contextmanager
    def logging_to(self, logger: Logger, lost: str) -> Iterator[None]:
        """Something that a logger writes, which may fail as `Trainer(on_save_error=...)` says.

        Args:
            logger: The logger.
            lost: What is missing if it does.

        Raises:
            OSError: It could not be written, and the run does not go on without it.
        """
        lost = f"{lost} {self.progress.updates}"
        try:
            yield
        except OSError as error:
            if not self.save_errors.tolerates:
                lost = f"{lost} was not saved: {words_of(error)}"
                error.add_note(f"drivetrain: {lost}. on_save_error='warn' goes on without it")
                raise
            self.save_errors.tell(type(logger).__name__, lost, error, self.last_checkpoint, LEFT_OUT)

    # Time.

    def start(self) -> None:
        """Begin training: set the host's random streams, and count wall time on from what `progress` already
        has.
        """
        if self.host_streams is None:
            self.engine.streams.start()
        else:
            with later.well_formed("the checkpoint's host_streams"):
                load_host_state(self.host_streams)
        self.origin = perf_counter() - self.progress.seconds

    def share_clock(self) -> None:
        """Have rank 0's seconds on all ranks, which must find the same things due."""
        ranks = self.engine.ranks
        if ranks.size > 1:
            self.progress.seconds = ranks.total([self.progress.seconds if ranks.rank == 0 else 0.0])[0]

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Add the time spent inside to `timing`."""
        return self.ledger.timed(kind)

    def due_to_stop(self) -> bool:
        """Whether the run's limits, the same on all ranks, are reached or all stop; notes the reason."""
        if self.stop_reason is None:
            totals, progress = self.totals, self.progress
            if totals.max_updates is not None and progress.updates >= totals.max_updates:
                self.stop_reason = f"max_steps={totals.max_updates} reached"
            elif totals.max_seconds is not None and progress.seconds >= totals.max_seconds:
                self.stop_reason = f"max_time={totals.max_seconds:g} seconds reached"
            elif totals.epochs is not None and progress.epoch >= totals.epochs:
                self.stop_reason = f"max_epochs={totals.epochs} reached"
        return self.stop_reason is not None

    # Checkpoints.

    def snapshot(self) -> Snapshot:
        """Everything that a resumed run needs, checked for NaN and infinity first.

        Raises:
            NonFiniteError: A loss since the last log point, or a weight, was NaN or infinite: such weights
                are not worth keeping.
            CheckpointError: A callback's, logger's or data's state cannot be stored.
            ConfigError: The task has got a parameter that is not trained.
        """
        self.check_parameters()
        self.engine.buffer.check()
        snapshot = later.snapshot_run(self)
        self.nonfinite.check_weights(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot, address: str) -> None:
        """Take over a checkpoint's state and tell the callbacks.

        Raises:
            CheckpointError: It does not fit this run; says what differs.
        """
        self.last_checkpoint = address
        later.restore_run(self, snapshot)
        self._refuse_past_end(address)
        self.engine.set_rates()
        self.call(self.hooks.on_checkpoint_loaded)

    def _refuse_past_end(self, address: str) -> None:
        totals, progress = self.totals, self.progress
        begun = progress.epoch + (1 if progress.epoch_batches else 0)
        for name, limit, there in (
            ("max_epochs", totals.epochs, begun),
            ("max_steps", totals.max_updates, progress.updates),
        ):
            if limit is not None and there > limit:
                raise CheckpointError(
                    f"{address} is past the end of this run: it is at update {progress.updates} in epoch"
                    f" {begun}, and {name}={limit}. Give a larger limit, or start in another run_dir"
                )

    def checkpoint_saved(self, address: str) -> None:
        """Called by savers after each commit."""
        self.last_checkpoint = address
        self.milestones += 1
        self.call(self.hooks.on_checkpoint_saved)

    def pending_values(self) -> dict[str, float]:
        """What `log` was given since the last log point; part of a checkpoint."""
        return dict(self._values)

    def set_pending_values(self, values: Mapping[str, float]) -> None:
        """Take over what `pending_values` gave."""
        self._values = dict(values)
