"""The run: the state and the parts of one fit, validation, test or prediction. Built fresh each time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from drivetrain.checkpoint.format.tree import well_formed
from drivetrain.checkpoint.saving.assets import Assets, checked_assets
from drivetrain.checkpoint.weights.frozen import FrozenParameters
from drivetrain.checkpoint.weights.module_state import clean_names
from drivetrain.core.calendar import RunLength
from drivetrain.core.errors import ConfigError, NonFiniteError
from drivetrain.core.random_streams import load_host_state, preserved, shielded
from drivetrain.core.synonyms import Elsewhere, missing
from drivetrain.core.types import Batch, CheckpointLogger, Logger
from drivetrain.data import Feed
from drivetrain.distributed.failure.named_locations import calls_hooks, named_location
from drivetrain.engine.engine import Engine
from drivetrain.engine.metrics.declared import DeclaredMetrics, joined
from drivetrain.engine.updater import check_trained
from drivetrain.engine.weighting import StepResult
from drivetrain.loggers.base import LOGGERS
from drivetrain.loggers.media import HOW_TO_LOG, Media
from drivetrain.loggers.pending import PendingMedia
from drivetrain.run.hooks import Hooks
from drivetrain.run.ledger import Ledger
from drivetrain.run.nonfinite import NonFinitePolicy
from drivetrain.run.save_errors import LEFT_OUT, words_of
from drivetrain.run.state import RunState, Triggers
from drivetrain.strategies.whole_weights import whole_weights
from drivetrain.task.attribute_state import AttributeState
from drivetrain.task.task import TaskModule


class Run(RunState):
    """One run in progress; loops and callbacks get it.

    Attributes:
        task: The task.
        engine: The engine: device, strategy, precision, optimizers.
        progress: Where the run is.
        stage: "train", "validation", "test" or "predict".
        length: The planned length.
        metrics: The latest value of every logged name.
        names: The names of the task's values.
        logged: The values of the current log point.
        logged_by_rank: In `on_log`, what each rank has logged since the last log point of the training; empty
            elsewhere, and in one process.
        latest: What was logged after the step `latest_at`, by one log point or several.
        latest_at: The last step of this program after which a value was logged; -1 before the first.
        run_dir: The directory for files, or None.
        frozen: The frozen parameters that the checkpoints leave out; None if they hold all.
        attributes: The attributes of the task that its checkpoints hold; None if it saves none.
        nonfinite: The policy for losses, weights and validations that are NaN or infinite.
        is_main: Whether this is rank 0.
        result: The last step's result, or None before the first.
        window: The window being trained on, or None.
        batch: In `on_micro_batch_end` and `on_evaluation_step_end` the batch that the hook is about, on the
            device; None elsewhere.
        outputs: In these two hooks, the outputs that the step returned for the batch, detached; None if it
            returned none.
        evaluation: Where the evaluation is.
        timing: Seconds spent so far on "data", "compute", "evaluation" and "save", and on "compile" if the
            task is compiled.
        ledger: The file with all of the run's time.
        stop_reason: Why the run stops, or None.
        postponed: Why a callback has asked to stop before the fit's minimum, or None.
        stopping: The ranks' agreement to stop.
        exception: The error that ended the run, for `on_exception`.
        validated: Whether the fit has made a validation that was due; one before a resume counts.
        in_turn: False after a validation that was made only because the fit ends.
        failure: The error that the run raises once it has ended in order, or None.
        last_checkpoint: The address of the last checkpoint saved or loaded, or None.
        save_errors: The policy for files that cannot be written.
        milestones: The number of checkpoints saved, of evaluation passes begun and of steps begun, added up.
        reports: How often `report_progress` was called.
        requests: The requests of this rank's hooks, "log", "validate", "save" or "end_epoch", each with its
            epoch.
        agreed: The requests that all ranks know and have not carried out yet.
        epoch_begun: The epoch that has begun last; `progress.epoch` counts those that have ended.
        saves_now: Whether the savers of this step must save.
        is_over: Whether training is over, so that only the last log point, if there is something to log, and
            `on_fit_end` follow. It is also True during the last log point before the last save, if a limit
            was reached.
        unlogged: The state before that log point. A resume with a larger limit continues from it. None before
            a limit is reached.
        evaluator: Makes the validations of a fit, and returns their values by name; a callback sets it in
            `on_fit_start`. None passes over the validation data once.
        loop: The steps of a fit that runs in the program's own loop; None for any other run.
        origin: The time, on `perf_counter`'s clock, at which `progress.seconds` was zero.
        host_streams: The states of the host's random generators from a checkpoint, or None.
        by_time: Whether anything is due by time, so that all ranks must use the same clock.
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
        length: RunLength | None = None,
        triggers: Triggers | None = None,
        train_feed: Feed | None = None,
        evaluation_feeds: Sequence[tuple[str | None, Feed]] = (),
        train_metrics: DeclaredMetrics | None = None,
        evaluation_metrics: Mapping[str | None, DeclaredMetrics] | None = None,
        on_save_error: str = "raise",
        frozen: FrozenParameters | None = None,
    ) -> None:
        super().__init__(task, engine, stage, on_save_error)
        self.callbacks = tuple(callbacks)
        self.loggers = tuple(loggers)
        self.hooks = Hooks(self.callbacks)
        self.run_dir = run_dir
        self.frozen = frozen
        self.attributes: AttributeState | None = None
        self.length = length or RunLength()
        self.triggers = triggers or Triggers()
        self.train_feed = train_feed
        self.evaluation_feeds = tuple(evaluation_feeds)
        self.train_metrics = train_metrics
        self.evaluation_metrics = evaluation_metrics or {}
        self.names.declare(train_metrics, "train")
        for loader, _ in self.evaluation_feeds:
            self.names.declare(self.metrics_of(loader), "validation", loader)
        self.nonfinite = NonFinitePolicy(self)
        self.ledger = Ledger(self)
        self.hook: Any = None  # the hook of a callback that is called now, for whoever watches the run
        self.evaluator: Callable[[], dict[str, float]] | None = None
        self.loop: Generator[StepResult, None, None] | None = None
        self.host_streams: dict[str, Any] | None = None
        self.by_time = (
            self.length.max_seconds is not None or self.triggers.log.by_time or self.triggers.validate.by_time
        )
        self._values: dict[str, float] = {}
        self.logged_by_rank: list[dict[str, float]] = []
        self._pending = PendingMedia(self.loggers)
        self._logging = False
        self._assets: list[Assets] | None = []
        self.origin = perf_counter()

    should_epoch_stop = Elsewhere()
    should_evaluate = Elsewhere()
    should_log = Elsewhere()
    should_save = Elsewhere()
    should_stop = Elsewhere()
    should_training_stop = Elsewhere()

    if not TYPE_CHECKING:  # mypy would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing(type(self), name))

    @property
    def is_suspended(self) -> bool:
        """Whether the run waits for the program's own loop, whose body is running or was left."""
        return self.loop is not None and inspect.getgeneratorstate(self.loop) == inspect.GEN_SUSPENDED

    def end_if_asked(self) -> None:
        """Raise at the end of training if a signal has ended it. A NaN loss takes precedence over a signal
        that restarts the program.

        Raises:
            Preempted: The program should be started again.
            KeyboardInterrupt: The program should stop.
        """
        reason = self.stop_reason
        if reason is not None and reason in self.stopping.signals:
            failure = None if self.failure is None else str(self.failure)
            self.stop_reason = self.stopping.end(reason, self.nonfinite.reason or failure)

    def save(self) -> None:
        """Save a checkpoint at the end of this step, after all hooks but the savers'.

        One rank may ask alone. All ranks then save after the same step, the first that no rank has ended, as
        for `stop`. If all ranks ask in the same step, they save after that step.

        Raises:
            ConfigError: The fit saves nothing (`checkpoint=False`), or this run is no fit.
        """
        self._request("save", bool(self.hooks.on_save), "saves nothing: give the Trainer a checkpoint policy")

    def validate(self) -> None:
        """Validate at the end of this step, as at `validate_every`. One rank may ask alone, as for `save`.

        Raises:
            ConfigError: The fit has no validation data, or this run is no fit.
        """
        self._request("validate", bool(self.evaluation_feeds), "has no validation data: give it to fit")

    def log_now(self) -> None:
        """Log at the end of this step, as at `log_every`. One rank may ask alone, as for `save`.

        Raises:
            ConfigError: This run is no fit.
        """
        self._request("log")

    def add_assets(self, assets: Assets) -> None:
        """Store files beside the weights of this fit's checkpoints; for `on_fit_start`.

        They replace the task's files of the same names, and the files of `Trainer(assets=...)` replace them.
        Rank 0 makes them once, after all callbacks' `on_fit_start`.

        Args:
            assets: What `Trainer(assets=...)` takes.

        Raises:
            ConfigError: They have another form, the fit has begun, or this run is no fit.
        """
        if self.train_feed is None:
            raise ConfigError(f"run.add_assets() is for a fit; this run is a {self.stage} run")
        if self._assets is None:
            raise ConfigError("run.add_assets() is for on_fit_start: the assets of this fit are made already")
        self._assets.append(checked_assets(assets, "run.add_assets()"))

    def take_assets(self) -> list[Assets]:
        """Return what `add_assets` was given; the saver calls this once, and none can be added any more."""
        added, self._assets = self._assets or [], None
        return added

    def end_epoch(self) -> None:
        """End the epoch with this step. One rank may ask alone, as for `save`.

        The epoch counts as one of `max_epochs`. Schedules keep the length that was planned. If the epoch ends
        by itself before all ranks know of the request, the request has no effect.

        Raises:
            ConfigError: This run is no fit.
        """
        self._request("end_epoch")

    def _request(self, what: str, is_possible: bool = True, problem: str = "") -> None:
        if self.train_feed is None:
            call = "log_now" if what == "log" else what
            raise ConfigError(f"run.{call}() is for the hooks of a fit; this run is a {self.stage} run")
        if not is_possible:
            raise ConfigError(f"run.{what}() in a fit that {problem}")
        self.requests[what] = self.epoch_begun
        if self.stopping.shared:
            self.stopping.want_meeting()

    def log(self, name: str, value: float | Tensor | Media) -> None:
        """Add a number, or a tensor of one, to the next log point; inside `on_log`, to the current log point.

        The name stays as it is given. During an evaluation, such as in `on_evaluation_end`, the number
        becomes one of the evaluation's.

        A value of `drivetrain.loggers`, such as an `Image` or a `Figure`, goes to the loggers that take its
        kind. Only rank 0's value is logged, and if there are several under one name, only the last one before
        the log point. It stays on its device until then, and is not part of a checkpoint.

        Raises:
            ConfigError: A tensor with more than one number, another object, or the name of a value of the
                task.
        """
        self.names.check_logged(name)
        if isinstance(value, Media):
            self._pending.add(name, value)
            return
        if isinstance(value, Tensor):
            value = self.engine.strategy.full_tensor(value).detach()
            if value.numel() != 1:
                raise ConfigError(
                    f"run.log({name!r}, ...) takes one number, not a tensor of shape {tuple(value.shape)}."
                    " Log its mean, or each of its numbers under a name of its own"
                )
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"run.log({name!r}, ...) takes a number or a value of drivetrain.loggers, not a"
                f" {type(value).__name__}. {HOW_TO_LOG}"
            ) from None
        (self.logged if self._logging else self._values)[name] = number

    def log_media(self, media: Mapping[str, Any]) -> None:
        """Add a step's `StepOutput(media=...)` to the next log point, under the names that the task gives.

        Raises:
            ConfigError: A value of another type, or a name that another value of the run has.
        """
        loader = None if self.stage == "train" else self.evaluation.loader
        for name, value in self.names.named(media, self.stage, loader, kind="media ").items():
            self._pending.add(name, value)

    def discarding_media(self) -> AbstractContextManager[None]:
        """Forget the images and other such values that are logged inside the block, and keep earlier ones."""
        return self._pending.discarding()

    @contextmanager
    def collecting(self) -> Iterator[dict[str, float]]:
        """Collect what is logged inside the block; the next log point does not get it."""
        outer, self._values = self._values, {}
        try:
            yield self._values
        finally:
            self._values = outer

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a sharded tensor, such as a parameter of the task, as a whole; any other tensor unchanged.

        All ranks call it together. Do not change the result in place: it may be the parameter.
        """
        return self.engine.strategy.full_tensor(tensor)

    @contextmanager
    def gathered(self) -> Iterator[TaskModule]:
        """Run the block with the whole weights in the task on every rank, under any strategy; yield the task.

        All ranks enter it together, in any hook but `on_exception`. Inside, each rank may call the model, or
        a part of it, as often as it likes and alone, on `run.engine.device`. The task is in evaluation mode,
        without gradients and in the run's precision. Changes of the weights are lost where they were sharded.
        At its end all random streams are as before, so that samples do not change the training.

        Each rank needs memory for all weights.
        """
        engine = self.engine
        engine.strategy.reshard(engine.model)
        with ExitStack() as stack:
            stack.enter_context(engine.modes.evaluating())
            stack.enter_context(whole_weights(engine.strategy, self.task))
            stack.enter_context(engine.step_module.evaluating(engine.step_module.step))
            stack.enter_context(preserved(engine.device))
            if engine.step_module.context is not None:
                stack.enter_context(engine.step_module.context())
            yield self.task

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Gather a state dict with whole tensors, on the CPU and on rank 0 only, under any strategy.

        All ranks call it together, in any hook. It gives what other programs expect of a model, such as
        `model.save_pretrained(path, state_dict=state)`.

        Args:
            module: The task or a module in it; None for the task.

        Returns:
            Copies of the tensors under the names of the module's own state dict, without prefixes of
            wrappers; tied tensors are one tensor. On all ranks but the first, an empty dict.
        """
        module = self.task if module is None else module
        strategy, first = self.engine.strategy, self.engine.ranks.rank == 0
        whole: dict[int, Tensor | None] = {}  # by the id of what is gathered once though it has several names
        with self.engine.checkpoint_layout():
            state = module.state_dict(keep_vars=True)
            names = clean_names(state, type(module).__name__)
            for tensor in state.values():
                if isinstance(tensor, Tensor) and id(tensor) not in whole:
                    gathered = strategy.full_tensor(tensor).detach()
                    whole[id(tensor)] = gathered.to("cpu", copy=True) if first else None
        found = {name: whole.get(id(state[given])) for name, given in names.items()}
        return {name: each for name, each in found.items() if each is not None}

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates now: "lr", with the names of the optimizer and of the group if there are
        several.

        A group with a rate of its own is named by its pattern: "lr/encoder" for ``ParameterGroup("encoder.*",
        lr=...)``. The groups of an optimizer that the user made are named by their entry "name", by the
        module that has their parameters, or by their number.
        """
        rates: dict[str, float] = {}
        for updater in self.engine.updaters.values():
            rates.update(updater.rates())
        return rates

    def metrics_of(self, loader: str | None) -> DeclaredMetrics | None:
        """Return the declared metrics of an evaluation set; None if there are none."""
        return self.evaluation_metrics.get(loader, self.evaluation_metrics.get(None)) or None

    @calls_hooks
    def call(self, hooks: Iterable[Any]) -> None:
        """Call hooks in order."""
        for hook in hooks:
            outer, self.hook = self.hook, hook
            hook(self)
            self.hook = outer

    def call_about(self, batch: Batch, outputs: Any, hooks: Iterable[Any]) -> None:
        """Call hooks with a batch and its outputs in `batch` and `outputs`; both are released afterwards."""
        self.batch, self.outputs = batch, outputs
        self.call(hooks)
        self.batch = self.outputs = None

    def check_parameters(self) -> None:
        """Check that the task trains the same parameters as when the run began; too slow for every step.

        Raises:
            ConfigError: A parameter was added, replaced or unfrozen since; names it.
        """
        engine = self.engine
        check_trained(self.task, engine.parameters, lambda: engine.strategy.reshard(engine.model))

    # Log points.

    @named_location("at a log point")
    def log_training(self) -> None:
        """Log the training: means since the last log point, declared metrics, and the callbacks' values.

        Nothing is logged if the run ends because of a loss.

        Raises:
            NonFiniteError: A loss was NaN or infinite.
            ConfigError: The task has a new parameter that is not trained.
        """
        self.check_parameters()
        if self.nonfinite.diverged:
            return
        try:
            means = self.engine.buffer.means(beside=self._values)
        except NonFiniteError as error:
            self.nonfinite.end(error)
            return
        self.engine.buffer.reset()
        self.logged_by_rank = self.engine.buffer.measured
        if self.engine.media is not None:
            self.log_media(self.engine.media)
            self.engine.media = None
        if self.train_metrics:
            means = joined(means, self.train_metrics.compute())
            self.train_metrics.reset()
        counts = self.names.named(self._skipped(), "train")
        if means or self._values or any(self.metrics.get(each, 0.0) != counts[each] for each in counts):
            self.log_point({**self.names.named(means, "train"), **counts}, agreed=True)
        elif self._pending:  # rank 0 may have some alone, so that no hook is called
            with shielded():
                self._log_pending()

    def _skipped(self) -> dict[str, float]:
        """Return the counts of what was left out, as far as the run may leave it out."""
        counts: dict[str, float] = {}
        if self.nonfinite.choice == "skip":
            counts["skipped_steps"] = float(self.progress.skipped)
        if self.train_feed is not None and self.train_feed.skips_bad_batches:
            counts["bad_batches"] = float(self.progress.bad_batches)
        return counts

    @named_location("at a log point")
    def log_point(self, values: Mapping[str, float], agreed: bool = False) -> None:
        """Publish values: to `metrics`, to the callbacks, then to the loggers.

        Args:
            values: By name.
            agreed: Whether all ranks have the same values, here and in what they have logged.
        """
        # A value that one rank measured of itself, such as its speed, must not make it decide alone.
        logged = {**self._values, **values}
        self.logged = logged if agreed else self.engine.ranks.first(lambda: logged)
        self._values = {}
        self._logging = True
        try:
            self._note_logged()
            if self.hooks.on_log or self.loggers:
                self._publish()
        finally:
            self._logging, self.logged_by_rank = False, []
        self.ledger.note_alive()

    def _note_logged(self) -> None:
        self.metrics.update(self.logged)
        if self.latest_at != self.progress.steps:
            self.latest, self.latest_at = {}, self.progress.steps
        self.latest.update(self.logged)

    def _publish(self) -> None:
        with shielded():
            self.call(self.hooks.on_log)
            if self.hooks.on_log:  # the same on all ranks, unlike loggers
                self.logged = self.engine.ranks.first(lambda: self.logged)
                self._note_logged()
            for logger in self.loggers if self.is_main else ():
                with self.logging_to(logger, f"what {type(logger).__name__} logs at step"):
                    logger.log_metrics(self.logged, self.progress.steps)
            if self._pending:
                self._log_pending()

    def _log_pending(self) -> None:
        for logger in self.loggers:
            with self.logging_to(logger, f"what {type(logger).__name__} logs at step"):
                self._pending.log_to(logger, self.progress.steps)
        self._pending.clear()

    @contextmanager
    def logging_to(self, logger: Logger, lost: str) -> Iterator[None]:
        """Run the block, which writes to a logger, and treat an error as `Trainer(on_save_error=...)` says.

        Args:
            logger: The logger.
            lost: The name of the values that are lost if the write fails.

        Raises:
            OSError: It could not be written, and save errors are not tolerated.
        """
        lost = f"{lost} {self.progress.steps}"
        try:
            with self.clock.span(type(logger).__name__):
                yield
        except OSError as error:
            if not self.save_errors.tolerates:
                lost = f"{lost} was not saved: {words_of(error)}"
                error.add_note(f"drivetrain: {lost}. on_save_error='warn' goes on without it")
                raise
            self.save_errors.report(lost, error, self.last_checkpoint, LEFT_OUT)

    # Time.

    def start(self) -> None:
        """Begin training: set the host's random streams, and continue the wall time from `progress`."""
        if self.host_streams is None:
            self.engine.streams.start()
        else:
            with well_formed("the checkpoint's host_streams"):
                load_host_state(self.host_streams)
        self.origin = perf_counter() - self.progress.seconds

    def sync_clock(self) -> None:
        """Use rank 0's seconds on all ranks, so that the same things are due on all of them."""
        ranks = self.engine.ranks
        if ranks.size > 1:
            self.progress.seconds = ranks.total([self.progress.seconds if ranks.rank == 0 else 0.0])[0]

    def timed(self, kind: str) -> AbstractContextManager[None]:
        """Add the time spent inside to `timing`."""
        return self.ledger.timed(kind)

    def stop_if_postponed(self) -> None:
        """Stop for the postponed reason, if the fit's minimum is reached."""
        if self.postponed is not None and not self.length.is_early(self.progress):
            reason, self.postponed = self.postponed, None
            self.stop_now(reason)

    # Checkpoints.

    def checkpoint_saved(self, address: str) -> None:
        """Called by savers after each commit."""
        self.last_checkpoint = address
        self.milestones += 1
        self.call(self.hooks.on_checkpoint_saved)
        for logger in self.loggers if self.is_main else ():
            if isinstance(logger, CheckpointLogger):
                logger.log_checkpoint(address)

    def logger(self, name: str) -> Any:
        """Return this fit's logger of a name, such as "wandb", with the tracker's own `experiment`.

        Only rank 0 has loggers, so ask `run.is_main` first.

        Raises:
            ConfigError: The name is unknown, or the fit has no such logger here.
        """
        kind = LOGGERS[name]
        for each in self.loggers:
            if type(each) is kind:
                return each
        if not self.is_main:
            raise ConfigError(f"only rank 0 has loggers: write `if run.is_main:` before run.logger({name!r})")
        given = ", ".join(type(each).__name__ for each in self.loggers) or "none"
        raise ConfigError(
            f"this fit has no logger {name!r}; it has {given}. Add {name!r} to Trainer(loggers=...)"
        )

    def pending_values(self) -> dict[str, float]:
        """The values logged since the last log point; part of a checkpoint."""
        return dict(self._values)

    def set_pending_values(self, values: Mapping[str, float]) -> None:
        """Take over what `pending_values` gave."""
        self._values = dict(values)
