"""Saves checkpoints when they are due, and the finished weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.unsaved_tensors import UnsavedTensors
from drivetrain.callbacks.watched import Watched
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, export_weights, strict_json
from drivetrain.checkpoint.filesystem import StorageError
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.weight_files import MODEL
from drivetrain.errors import CheckpointError, NonFiniteError
from drivetrain.module_state import module_state
from drivetrain.save_errors import AGAIN, OVER, newest
from drivetrain.types import Trigger

if TYPE_CHECKING:
    from drivetrain.checkpoint import Snapshot
    from drivetrain.run import Run


class CheckpointSaver(Callback):
    """Saves resume points at an interval, and keepers when the metric that ranks them has come; the Trainer
    makes one from `checkpoint=`.

    It acts in `on_save`, after all other hooks of an update, so that what they changed is in the file. A run
    that stops, for whatever reason of its own, is saved once more, unless it just was.

    Args:
        config: The policy.
        manager: The checkpoints of the run directory.
        root: Where the finished weights go: a directory or an address.
        metric_required: Whether a run without the metric that ranks keepers is an error; not so for a policy
            that nobody asked for.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        manager: CheckpointManager,
        root: str,
        *,
        metric_required: bool = True,
    ) -> None:
        self.config = config
        self.manager = manager
        self.root = root
        self._watched = Watched(
            config.by or "",
            "CheckpointConfig ranks checkpoints by",
            "With by=None none is kept as the best",
            required=metric_required and config.keepers > 0,
        )
        self._trigger = Trigger(None)
        self._begun = -1
        self._unsaved: StorageError | None = None
        self._unsaved_tensors: UnsavedTensors | None = None
        self._owes = False

    @property
    def weights(self) -> str:
        """Where the finished weights go."""
        return file_system(self.root).join(self.root, MODEL)

    def on_fit_start(self, run: Run) -> None:
        """Begin the interval where the run stands.

        Raises:
            ConfigError: The metric that ranks keepers cannot come in this run.
        """
        self._watched.begin(run)
        self._unsaved_tensors = None
        self._trigger = Trigger(self.config.interval, run.totals.updates_per_epoch)
        self._trigger.start(run.progress)
        run.by_time = run.by_time or (
            self._trigger.every is not None and self._trigger.every.seconds is not None
        )

    def settle(self, run: Run) -> None:
        """Wait for what is still being written."""
        self._attempt(run, self.manager.wait)

    def went_back(self, run: Run) -> None:
        """Save at the end of this update, since the run was taken back to an earlier state."""
        self.manager.disown()
        self._trigger.start(run.progress)
        self._watched.forget()
        self._owes = True

    def on_save(self, run: Run) -> None:
        """Save if the interval ends here, the metrics are among the best, or the run is about to end."""
        if self._unsaved_tensors is None and run.step is not None:  # the first update of this program
            self._unsaved_tensors = UnsavedTensors(run.task)
            _check_extent(run)
        if self.manager.is_writing:
            self._attempt(run, self.manager.poll)
        progress = run.progress
        epoch_ended = progress.epoch_batches == 0
        applied = run.step is None or run.step.applied
        due = (applied or epoch_ended) and self._trigger.due(progress, epoch_ended)
        keeper = run.latest_at == progress.updates and self._is_among_best(run)
        resume = due or self._owes or run.stop_reason is not None
        if not (resume or keeper) or run.nonfinite.spoiled:
            return
        if run.nonfinite.rolls_back():  # the metrics were those of other weights
            resume, keeper = True, False
        self._owes = False
        self._save(run, resume, keeper)
        if self._owes:  # the run was taken back
            self.on_save(run)

    def _is_among_best(self, run: Run) -> bool:
        """Whether the metric that ranks keepers has come, and is among the best."""
        return self._watched.came(run) and self.manager.should_keep(run.metrics)

    def _save(self, run: Run, resume: bool, keeper: bool) -> None:
        progress = run.progress

        held: set[str] = set()

        def snapshot() -> Snapshot:
            taken = run.snapshot()
            held.update(taken.tensors["model"])
            return taken

        def save() -> str | None:
            saved = self.manager.save(
                progress.updates, progress.epoch, run.metrics, snapshot, resume=resume, keeper=keeper
            )
            return None if self.manager.is_writing else saved.path

        bad: NonFiniteError | None = None
        with run.timed("save"):
            self.settle(run)
            self._begun = progress.updates
            try:
                self._attempt(run, save)
            except NonFiniteError as error:
                bad = error
        if bad is not None:
            run.nonfinite.end(bad)
        if held and run.is_main and self._unsaved_tensors is not None:
            self._unsaved_tensors.warn(run.task, held)

    def _attempt(self, run: Run, act: Callable[[], str | None]) -> None:
        """Have the manager do something, tell of what it committed, or of what it could not write.

        Raises:
            StorageError: It could not, on any rank, and the run does not go on without it.
        """
        try:
            committed = act()
        except StorageError as error:
            self._unsaved = error
            if not run.save_errors.tolerates:
                raise
            lost = f"the checkpoint after update {self._begun}"
            is_last = run.stop_reason is not None and self._begun == run.progress.updates
            then = OVER if is_last or run.exception is not None else AGAIN
            run.save_errors.tell("checkpoint", lost, error, run.last_checkpoint, then)
            return
        if committed is not None:
            self._unsaved = None
        self._tell(run, committed)

    def _tell(self, run: Run, committed: str | None) -> None:
        if committed is not None and committed != run.last_checkpoint:
            run.checkpoint_saved(committed)

    def on_fit_end(self, run: Run) -> None:
        """Wait for what is still being written, and leave the weights as a plain safetensors file.

        Raises:
            StorageError: The end of the run is not saved, whatever may have been left out before: there is
                nothing left to go on with, and nobody who would save it later.
        """
        if run.nonfinite.spoiled is None and self._is_among_best(run):
            self._save(run, resume=False, keeper=True)  # by the last log point, which comes after the saves
        with run.timed("save"):
            self.settle(run)
        self._watched.end(run)
        if run.nonfinite.spoiled is not None:
            return
        with run.engine.exchanged():
            weights, _ = module_state(run.task)
        ended = f"the run ended after update {run.progress.updates} ({run.stop_reason})"
        besides = ""
        with run.timed("save"):  # all ranks hear of it, and none goes on before the file is there
            try:
                run.engine.ranks.together(lambda: export_weights(weights, self.weights, write=run.is_main))
            except StorageError as error:
                if self._unsaved is None:
                    raise
                besides = f". Nor are the finished weights: {error}"
        if self._unsaved is not None:
            there = newest(run.last_checkpoint)
            lost = StorageError(f"{ended}, which is not saved: {self._unsaved}{besides}. {there}")
            lost.code = self._unsaved.code
            raise lost from self._unsaved

    def on_exception(self, run: Run) -> None:
        """Let a save that has begun end: it was good when it began."""
        if self.manager.is_writing:
            self.settle(run)


def _check_extent(run: Run) -> None:
    """Refuse more parameters than a checkpoint can describe, once their state in the optimizers is there.

    Raises:
        CheckpointError: The first save would fail, perhaps hours later.
    """
    optimizers = [each.optimizer for each in run.engine.updaters.values()]
    parameters = sum(len(group["params"]) for each in optimizers for group in each.param_groups)
    states = [slots for each in optimizers for slots in each.state.values() if isinstance(slots, dict)]
    slots = sum(map(len, states))
    # Each of them is three keys in state.json: its name, dtype and shape.
    if 3 * (parameters + slots) > strict_json.MAX_CONTAINERS:
        raise CheckpointError(
            f"{parameters} trained parameters with {slots} entries of optimizer state are more than a"
            f" checkpoint can describe: together at most {strict_json.MAX_CONTAINERS // 3}. Join parameters"
            " of one shape, such as those of a layer's experts, or use checkpoint=False"
        )
