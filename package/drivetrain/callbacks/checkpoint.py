"""Saves checkpoints when they are due, and the finished weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, export_weights
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.weight_files import MODEL
from drivetrain.module_state import module_state
from drivetrain.types import Trigger

if TYPE_CHECKING:
    from drivetrain.run import Run


class CheckpointSaver(Callback):
    """Saves resume points at an interval and keepers after evaluations; the Trainer makes one from
    `checkpoint=`.

    It acts in `on_save`, after all other hooks of an update, so that what they changed is in the file. A run
    that stops, for whatever reason of its own, is saved once more, unless it just was.

    Args:
        config: The policy.
        manager: The checkpoints of the run directory.
        root: Where the finished weights go: a directory or an address.
        metric_required: Whether an evaluation without the metric that ranks keepers is an error; not so for a
            policy that nobody asked for.
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
        self._metric_required = metric_required
        self._trigger = Trigger(None)
        self._found: dict[str, float] | None = None

    @property
    def weights(self) -> str:
        """Where the finished weights go."""
        return file_system(self.root).join(self.root, MODEL)

    def on_fit_start(self, run: Run) -> None:
        """Begin the interval where the run stands."""
        self._trigger = Trigger(self.config.interval, run.totals.updates_per_epoch)
        self._trigger.start(run.progress)
        run.by_time = run.by_time or (
            self._trigger.every is not None and self._trigger.every.seconds is not None
        )

    def on_evaluation_end(self, run: Run) -> None:
        """Note that there are new metrics to rank by; a value of an earlier validation is none of them."""
        if run.stage == "validation":
            given = run.evaluation.values
            self._found = {
                name: value
                for name, value in run.metrics.items()
                if name in given or not name.startswith("validation/")
            }

    def on_save(self, run: Run) -> None:
        """Save if the interval ends here, the metrics are among the best, or the run is about to end."""
        if self.manager.is_writing:
            self._tell(run, self.manager.poll())
        progress = run.progress
        epoch_ended = progress.epoch_batches == 0
        applied = run.step is None or run.step.applied
        due = (applied or epoch_ended) and self._trigger.due(progress, epoch_ended)
        found, self._found = self._found, None
        keeper = found is not None and self._ranks(found) and self.manager.should_keep(found)
        resume = due or run.stop_reason is not None
        if resume or keeper:
            metrics = run.metrics if found is None else found
            with run.timed("save"):
                self._tell(run, self.manager.wait())
                saved = self.manager.save(
                    progress.updates, progress.epoch, metrics, run.snapshot, resume=resume, keeper=keeper
                )
            if not self.manager.is_writing:
                self._tell(run, saved.path)

    def _tell(self, run: Run, committed: str | None) -> None:
        if committed is not None and committed != run.last_checkpoint:
            run.checkpoint_saved(committed)

    def _ranks(self, metrics: Mapping[str, float]) -> bool:
        return self._metric_required or self.config.by in metrics

    def on_fit_end(self, run: Run) -> None:
        """Wait for what is still being written, and leave the weights as a plain safetensors file."""
        with run.timed("save"):
            self._tell(run, self.manager.wait())
        with run.engine.exchanged():
            weights, _ = module_state(run.task)
        export_weights(weights, self.weights, write=run.is_main)
        run.engine.ranks.all_gather(None)  # no rank goes on before the file is there

    def on_exception(self, run: Run) -> None:
        """Let a save that has begun end: it was good when it began."""
        self._tell(run, self.manager.wait())
