"""The log points at which a callback logs, and the updates that one may follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.core.intervals import steps_or_epochs

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import Interval


def may_be_logged(run: Run) -> bool:
    """Return whether a log point may follow the update that is being made."""
    every, update = run.triggers.log.every, run.progress.updates + 1
    if every is None:
        due = False
    elif every.unit == "steps":
        due = update % int(every.amount) == 0 or (run.triggers.log.ends_epochs and ends_epoch(run))
    else:
        due = every.unit != "epochs" or every.amount < 1 or ends_epoch(run)
    return due or update in (1, run.totals.updates) or run.totals.updates is None


def ends_epoch(run: Run) -> bool:
    """Return whether the update that is being made is the last of its epoch."""
    return run.window is not None and bool(run.window.last)


class LogPoints:
    """The first log point at or after each end of an interval, once for each update.

    Args:
        argument: The user's name for the interval, such as "WeightHistograms(every=)".
        every: The interval in steps or whole epochs; None takes every log point.

    Raises:
        ConfigError: It is another interval.
    """

    def __init__(self, argument: str, every: Interval | None) -> None:
        self.every = None if every is None else steps_or_epochs(argument, every)
        self._updates = self._epochs = 0

    def begin(self, run: Run) -> None:
        """Forget another fit's log points; for `on_fit_start`."""
        if self._updates > run.progress.updates:
            self._updates = self._epochs = 0

    def may_follow(self, run: Run) -> bool:
        """Return whether one of these log points may follow the update that is being made."""
        progress = run.progress
        return may_be_logged(run) and self._passes(progress.updates + 1, progress.epoch + ends_epoch(run))

    def take(self, run: Run) -> bool:
        """Return whether the present log point is one of these, and count it."""
        updates, epochs = run.progress.updates, run.progress.epoch
        if not self._passes(updates, epochs):
            return False
        self._updates, self._epochs = updates, epochs
        return True

    def _passes(self, updates: int, epochs: int) -> bool:
        if self.every is None:
            return updates > self._updates
        before, now = (self._updates, updates) if self.every.unit == "steps" else (self._epochs, epochs)
        return now // int(self.every.amount) > before // int(self.every.amount)

    def state_dict(self) -> dict[str, Any]:
        """Return the update and the epoch of the last of these log points."""
        return {"updates": self._updates, "epochs": self._epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._updates, self._epochs = int(state["updates"]), int(state["epochs"])
