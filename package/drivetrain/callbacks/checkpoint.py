"""Saves checkpoints when they are due, and the finished weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.monitored_metric import MonitoredMetric
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager
from drivetrain.checkpoint.assets import write_assets
from drivetrain.checkpoint.format.asset_files import ASSETS
from drivetrain.checkpoint.format.tensors import check_tensor, has_plain_bytes
from drivetrain.checkpoint.saving.assets import Assets, checked_assets, make_assets
from drivetrain.checkpoint.saving.config import rankings
from drivetrain.checkpoint.storage.filesystem import StorageError
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.files import MODEL
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.core.calendar import Trigger
from drivetrain.core.errors import NonFiniteError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import preserved
from drivetrain.distributed.failure.named_locations import named_location, register_opaque
from drivetrain.engine.own_loop_checkpoint import optimizer_state
from drivetrain.run.checkpoint import restore_weights, snapshot_to_save
from drivetrain.task.model_info import info_of

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.checkpoint import Snapshot
    from drivetrain.run.run import Run

register_opaque(__file__)

_LOG = logger(__name__)


class CheckpointSaver(Callback):
    """Saves resume points at intervals, and the best checkpoints by a metric.

    The Trainer makes one from `checkpoint=`. It acts in `on_save`, after all other hooks of a step, so
    that their changes are in the file. A run that stops itself is saved once more, unless it was just saved.

    Args:
        policies: The policies; one save serves all that ask for one at a step.
        manager: The checkpoints of the run directory.
        root: The directory or address for the finished weights.
        metric_required: Whether a run without a metric that ranks is an error. It is not for the
            default policy.
        assets: `Trainer(assets=...)`; rank 0 writes them, with those of the task and of the callbacks.

    Attributes:
        weights: The path or address of the finished weights; None before they are written.
    """

    def __init__(
        self,
        policies: Sequence[CheckpointConfig],
        manager: CheckpointManager,
        root: str,
        *,
        metric_required: bool = True,
        assets: Assets = (),
    ) -> None:
        self.policies = tuple(policies)
        self._given = assets
        self._assets: dict[str, bytes] = {}
        self.weights: str | None = None
        self.manager = manager
        self.root = root
        self._monitored = {
            by: MonitoredMetric(
                by,
                "CheckpointConfig ranks checkpoints by",
                "With by=None none is kept as the best",
                required=metric_required,
            )
            for by in rankings(policies)
        }
        self._triggers: dict[str, Trigger] = {}
        self._saving_step = -1
        self._is_checked = self._goes_on = False

    def on_fit_start(self, run: Run) -> None:
        """Remove what a kill has left, start the save intervals at the run's progress, and make assets."""
        for monitored in self._monitored.values():
            monitored.begin(run)
        self.policies = self.manager.policies = tuple(
            each.with_direction(None if each.by is None else run.names.direction(each.by))
            for each in self.policies
        )
        with self._tolerating(run):
            self.manager.prune(run.last_checkpoint, run.metrics)
        # Of a run in this directory: its finished weights may be of a version that did not mark them.
        self._goes_on = (run.last_checkpoint or "").startswith(self.root)
        if run.frozen is not None:
            run.frozen.watch(run.task)
        self._is_checked = False
        self._triggers = {
            each.interval_name: Trigger(each.interval, run.length.calendar)
            for each in self.policies
            if each.interval_name is not None
        }
        for trigger in self._triggers.values():
            trigger.start(run.progress)
            run.by_time = run.by_time or trigger.by_time

        with preserved():  # code that draws random numbers must not change the run
            self._assets = {}
            run.engine.ranks.first(lambda: self._assets.update(self._made_assets(run)))

    def _made_assets(self, run: Run) -> dict[str, bytes]:
        of_task = f"the assets of {type(run.task).__name__}.model_info()"
        return make_assets(
            (of_task, checked_assets(info_of(run.task).assets, of_task)),
            *(("run.add_assets()", each) for each in run.take_assets()),
            ("Trainer(assets=)", self._given),
        )

    def best_checkpoints(self) -> dict[str, str]:
        """Return the paths of the best checkpoints, by the metrics that rank; the first policy's first."""
        found = {by: self.manager.best(by) for by in rankings(self.policies)}
        return {by: path for by, path in found.items() if path is not None}

    def best_value(self) -> float | None:
        """Return the value of the first policy's best checkpoint, or None if there is none."""
        found = self.best_checkpoints()
        return self.manager.best_value(next(iter(found))) if found else None

    def wait_for_save(self, run: Run) -> None:
        committed = None
        with self._tolerating(run):
            committed = self.manager.wait()
        self._note_committed(run, committed)

    @named_location("in a save")
    def on_save(self, run: Run) -> None:
        """Save if an interval ends here, a metric is among the best, or the run is about to end."""
        if not self._is_checked and run.result is not None:  # the first step of this program
            self._is_checked = True
            if self.policies[0].resumable:
                _check_storable(run)
        if self.manager.is_writing:
            committed = None
            with self._tolerating(run):
                committed = self.manager.poll()
            self._note_committed(run, committed)
        progress = run.progress
        epoch_ended = progress.epoch_batches == 0
        applied = run.result is None or run.result.applied
        due: list[str] = []
        if applied or epoch_ended:
            due = [name for name, each in self._triggers.items() if each.due(progress, epoch_ended)]
        best = self._best_by(run) if run.latest_at == progress.steps else []
        if run.saves_now or run.stop_reason is not None:
            due.append("")
        if (due or best) and not run.nonfinite.diverged:
            self._save(run, due, best)

    def _best_by(self, run: Run) -> list[str]:
        """Return the metrics that rank and have a new value among the best."""
        fresh = [by for by, monitored in self._monitored.items() if monitored.has_new_value(run)]
        return [by for by in fresh if self.manager.should_keep(run.metrics, by)]

    def _save(self, run: Run, resume: Sequence[str], best: Sequence[str]) -> None:
        progress = run.progress
        bad: NonFiniteError | None = None
        with run.timed("save"):
            self.wait_for_save(run)
            self._saving_step, saved = progress.steps, None
            try:
                with self._tolerating(run), as_saved(run):
                    factory = partial(self._snapshot, run)
                    saved = self.manager.save(
                        progress.steps, progress.epoch, run.metrics, factory, resume=resume, best=best
                    )
                if saved is not None and not self.manager.is_writing:
                    self._note_committed(run, saved.path)
            except NonFiniteError as error:
                bad = error
        if bad is not None:
            run.nonfinite.end(bad)

    def _snapshot(self, run: Run) -> Snapshot:
        snapshot = snapshot_to_save(run, self.policies[0].resumable)
        snapshot.assets = self._assets
        return snapshot

    @contextmanager
    def _tolerating(self, run: Run) -> Iterator[None]:
        """Run the block, a manager's operation, and report what it could not write.

        Raises:
            StorageError: A rank could not write, and the run must stop, or ends and has no later save.
        """
        try:
            yield
        except StorageError as error:
            is_last = run.stop_reason is not None and self._saving_step == run.progress.steps
            if is_last or not run.save_errors.tolerates:
                raise
            lost = f"the checkpoint after step {self._saving_step}"
            run.save_errors.report(lost, error, run.last_checkpoint)

    def _note_committed(self, run: Run, committed: str | None) -> None:
        if committed is not None and committed != run.last_checkpoint:
            run.checkpoint_saved(committed)

    def on_fit_end(self, run: Run) -> None:
        """Wait for a save in progress, and write the weights: a plain safetensors file, unless the task does.

        Raises:
            StorageError: The weights are not saved. It is raised even if save errors are tolerated, because
                no later save can follow.
        """
        if run.nonfinite.diverged is None and (best := self._best_by(run)):
            self._save(run, (), best)  # by the last log point, which comes after the saves
        with run.timed("save"):
            self.wait_for_save(run)
        for monitored in self._monitored.values():
            monitored.end(run)
        if run.nonfinite.diverged is not None:
            return
        if run.failure is None:
            self._restore_best(run)
        with run.engine.checkpoint_layout():
            weights, _ = module_state(run.task)
        with run.timed("save"):  # all ranks learn of an error, and none goes on before the file exists
            run.engine.ranks.together(lambda: self._write_finished(run, weights))

    def _restore_best(self, run: Run) -> None:
        by = next((each.by for each in self.policies if each.restore_best), None)
        if by is None:
            return
        best = run.engine.ranks.first(lambda: self.manager.best(by))
        if best is not None:
            restore_weights(run, best)
        elif run.is_main:
            _LOG.warning(
                f"CheckpointConfig(restore_best=True): no checkpoint is the best by {by!r}, so the task has"
                " the weights of the last step"
            )

    def _write_finished(self, run: Run, weights: dict[str, Tensor]) -> None:
        files = file_system(self.root)
        save = info_of(run.task).save_finished
        frozen = None if run.frozen is None else dict(run.frozen.found)
        path = None if save is None else save(self.root, weights, self._assets, run.is_main, frozen)
        if path is None:
            path = files.join(self.root, MODEL)
            kept = weights if run.frozen is None else run.frozen.without(weights)
            export_weights(kept, path, write=run.is_main, overwrite=self._goes_on, frozen=frozen)
        if run.is_main:
            write_assets(files.join(self.root, ASSETS), self._assets)
        self.weights = path

    def on_exception(self, run: Run) -> None:
        """Let a save in progress finish: its state was good when it began."""
        if self.manager.is_writing:
            self.wait_for_save(run)


@contextmanager
def as_saved(run: Run) -> Iterator[None]:
    """Run the block with the task and its optimizers as they, and the callbacks, have them saved."""
    with run.engine.modes.saving(), ExitStack() as stack:
        for each in run.callbacks:
            stack.enter_context(each.saving(run))
        yield


def _check_storable(run: Run) -> None:
    """Check that files can hold what the first step has made: the slots of the optimizers.

    Raises:
        CheckpointError: The first save would fail, perhaps hours later.
    """
    with as_saved(run), run.engine.checkpoint_layout() as taken:
        tensors, _ = optimizer_state(run.task, taken)
    for name, tensor in tensors.items():
        if has_plain_bytes(tensor):
            check_tensor(tensor, f"checkpoints cannot hold {name!r}")
