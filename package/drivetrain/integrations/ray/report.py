"""The callback that reports a fit's values and checkpoints to Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.monitored_metric import MonitoredMetric
from drivetrain.core.errors import ConfigError, MissingDependencyError
from drivetrain.core.registry import is_installed

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy


class RayReport(Callback):
    """Reports the values of a fit to Ray Tune or Ray Train, each time with a checkpoint of the same step.

    It reports whenever the metric has a new value, and asks for a save in that step. All ranks call Ray's
    `report`, as Ray Train needs it; rank 0 gives the checkpoint.

    Args:
        metric: The name of a logged value.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: When a Trainer is made: it saves no checkpoints. At the start of a fit: the fit does not
            log the metric.
    """

    def __init__(self, metric: str = "validation/loss") -> None:
        if not is_installed("ray"):
            raise MissingDependencyError("ray", "ray", "RayReport")
        self._monitored = MonitoredMetric(metric, "RayReport reports")
        self._values: Mapping[str, float] | None = None

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that there are checkpoints.

        Raises:
            ConfigError: There are none.
        """
        if trainer.checkpoint is False:
            raise ConfigError("RayReport reports checkpoints, and checkpoint=False saves none")

    def on_fit_start(self, run: Run) -> None:
        """Check that the fit can give the metric."""
        self._values = None
        self._monitored.begin(run)

    def on_log(self, run: Run) -> None:
        """Ask for a save in this step if the metric has a new value."""
        if self._monitored.has_new_value(run):
            self._values = {
                **run.metrics,
                "steps": float(run.progress.steps),
                "epochs": float(run.progress.epoch),
            }
            run.save()

    def on_checkpoint_saved(self, run: Run) -> None:
        """Report the values with the checkpoint."""
        values, self._values = self._values, None
        if values is not None:
            _report(values, run.last_checkpoint if run.is_main else None)

    def on_fit_end(self, run: Run) -> None:
        """Check that the metric has come."""
        self._monitored.end(run)


def _report(values: Mapping[str, float], path: str | None) -> None:
    from ray import train, tune

    try:
        train.get_context()
        library = train
    except (RuntimeError, DeprecationWarning):  # no worker of Ray Train; the latter in a trial of Ray Tune
        library = tune
    checkpoint = None if path is None else library.Checkpoint.from_directory(path)
    library.report(dict(values), checkpoint=checkpoint)
