"""The end of a fit as transformers' Trainer has it."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.callbacks.base import Callback
from drivetrain.core.calendar import Point
from drivetrain.core.intervals import Every
from drivetrain.run.run import Run


@dataclass(frozen=True)
class LastStep(Callback):
    """Logs and evaluates at the last step of a fit, as transformers' Trainer does.

    It ends an epoch that it cuts short, and it is evaluated even if no interval of steps ends there.

    Args:
        logs: Whether to log.
        validates: Whether to evaluate.
        begins: Evaluations begin this long after the start of the run; None evaluates from the start.
    """

    logs: bool
    validates: bool
    begins: Every | None = None

    def on_step_end(self, run: Run) -> None:
        """Ask for both; what an interval asks for too is done once."""
        if run.progress.steps != run.length.steps:
            return
        if self.logs:
            run.log_now()
        if self.validates and run.evaluation_feeds and self._has_begun(run):
            run.validate()

    def _has_begun(self, run: Run) -> bool:
        return self.begins is None or Point(self.begins, run.length.calendar).reached(run.progress)
