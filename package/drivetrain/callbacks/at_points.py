"""Callbacks that evaluate the whole weights at points of a fit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.core.calendar import Trigger
from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import no_time

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run


def is_due(trigger: Trigger, run: Run) -> bool:
    """Return whether an interval that is no time ends with this step; for `on_step_end`."""
    assert trigger.every is not None
    assert run.window is not None
    ends = trigger.every.unit == "epochs" and bool(run.window.last)
    progress = replace(run.progress, epoch=run.progress.epoch + 1) if ends else run.progress
    return trigger.due(progress, ends)


class AtPoints(Callback):
    """Calls `evaluate` with the whole weights at each validation, or at an interval.

    Args:
        every: The interval, such as "500 steps" or "1 epoch"; None is each validation.
    """

    changes_data = False

    def __init__(self, every: Interval | None) -> None:
        self.every = None if every is None else no_time(f"{type(self).__name__}(every=)", every)
        self._trigger = Trigger(None)

    @abstractmethod
    def evaluate(self, run: Run) -> None:
        """Evaluate the task, and log what comes out; all ranks call it, inside `run.gathered()`."""

    def on_fit_start(self, run: Run) -> None:
        """Start the interval, and evaluate if step 0 is listed.

        Raises:
            ConfigError: Without an interval: the fit has no validation data.
        """
        if self.every is None and not run.evaluation_feeds:
            raise ConfigError(
                f"{type(self).__name__} without every= follows the validations, and this fit has no"
                " validation data. Give every='500 steps', or validation data"
            )
        self._trigger = Trigger(self.every, run.length.calendar)
        self._trigger.start(run.progress)
        if self._trigger.at_start and not run.progress.steps:
            self._evaluate(run)

    def on_step_end(self, run: Run) -> None:
        """Evaluate if the interval ends with this step."""
        if self.every is not None and is_due(self._trigger, run):
            self._evaluate(run)

    def on_evaluation_end(self, run: Run) -> None:
        """Evaluate after each validation, if there is no interval."""
        if self.every is None and run.train_feed is not None and not run.evaluation.is_sanity_check:
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        with run.gathered():
            self.evaluate(run)
