"""The log points at which a callback logs, and the steps that one may follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.core.intervals import steps_or_epochs

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run


def may_be_logged(run: Run) -> bool:
    """Return whether a log point may follow the step that is being made."""
    every, step = run.triggers.log.every, run.progress.steps + 1
    if every is None:
        due = False
    elif every.unit == "steps":
        due = step % int(every.amount) == 0 or (run.triggers.log.ends_epochs and ends_epoch(run))
    else:
        due = every.unit != "epochs" or every.amount < 1 or ends_epoch(run)
    return due or step in (1, run.totals.steps) or run.totals.steps is None


def ends_epoch(run: Run) -> bool:
    return run.window is not None and bool(run.window.last)


class LogPoints:
    """The first log point at or after each end of an interval, once for each step.

    Args:
        every: The interval in steps or whole epochs; None takes every log point.
    """

    def __init__(self, argument: str, every: Interval | None) -> None:
        self.every = None if every is None else steps_or_epochs(argument, every)
        self._steps = self._epochs = 0

    def begin(self, run: Run) -> None:
        """Forget another fit's log points; for `on_fit_start`."""
        if self._steps > run.progress.steps:
            self._steps = self._epochs = 0

    def may_follow(self, run: Run) -> bool:
        """Return whether one of these log points may follow the step that is being made."""
        progress = run.progress
        return may_be_logged(run) and self._passes(progress.steps + 1, progress.epoch + ends_epoch(run))

    def take(self, run: Run) -> bool:
        """Return whether the present log point is one of these, and count it."""
        steps, epochs = run.progress.steps, run.progress.epoch
        if not self._passes(steps, epochs):
            return False
        self._steps, self._epochs = steps, epochs
        return True

    def _passes(self, steps: int, epochs: int) -> bool:
        if self.every is None:
            return steps > self._steps
        before, now = (self._steps, steps) if self.every.unit == "steps" else (self._epochs, epochs)
        return now // int(self.every.amount) > before // int(self.every.amount)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "epochs": self._epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._epochs = int(state["steps"]), int(state["epochs"])


class LoggingCallback(Callback):
    """A callback that logs at some log points; the last of them is its state in a checkpoint."""

    _points: LogPoints

    def state_dict(self) -> dict[str, Any]:
        """Return the last log point with values of this callback."""
        return self._points.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._points.load_state_dict(state)
