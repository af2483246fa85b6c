"""The length of a fit and the steps at its intervals, computed without reading any data."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.core.calendar import Calendar, RunLength, Trigger
from drivetrain.core.int_schedule import at_start, most
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.data import Feed, Shard, Transfer, as_source, batch_size
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule, measure_of
from drivetrain.trainer.feeds import accumulation, batch_sizes

_AT_END = "the end of the run"
_ENDLESS = 2**40  # steps of a run of unknown length


@dataclass(frozen=True)
class Firings:
    """The steps after which an interval is due, counted from 1 like `Progress.steps` after a step.

    Attributes:
        every: The interval, or None for never.
        times: How often in the run; None when that is not known beforehand.
        first: The step after which it is first due, or None.
        last: The step after which it is last due, or None.
    """

    every: str | None
    times: int | None
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        if self.every is None:
            return "never"
        if self.times is None:
            first = "" if self.first is None else f", first after step {self.first:,}"
            return f"{self.every}{first}; how often is not known"
        if not self.times:
            return f"{self.every}: never in this run"
        if self.times == 1:
            return f"{self.every}: once, after step {self.first:,}"
        return f"{self.every}: {self.times:,} times, after steps {self.first:,} to {self.last:,}"


class Epoch:
    """The calendar of the training data, without reading any.

    Attributes:
        feed: The data as a run would feed it.
        calendar: The windows; those of a list of equal batches count their samples.
        batches: Micro-batches, or None; those of the first epoch if they change.
        exact: Whether the data's length can be relied on.
    """

    def __init__(self, settings: RunSettings, task: TaskModule, data: Any) -> None:
        processes = settings.select_strategy().data_size
        source = as_source(
            data,
            "training",
            settings.seed,
            batch_size=at_start(settings.batch_size),
            shuffle=True,
            shard=Shard(0, processes),
        )
        transfer, steps = Transfer(torch.device("cpu")), accumulation(settings, source)
        limit, sizes = settings.limit_train_batches, batch_sizes(settings, data)
        self.feed = Feed(source, transfer, measure_of(task), steps, limit, sizes)
        self.calendar = self.feed.calendar
        self.batches = self.feed.batches_per_epoch
        self.exact = source.exact and not source.is_split  # the other processes' parts are not known here
        each = [batch_size(batch) or 0 for batch in data] if isinstance(data, (list, tuple)) else []
        if each and self.calendar.is_planned and set(each[:-1]) <= {each[0]} and 0 < each[-1] <= each[0]:
            self.calendar = Calendar(
                self.calendar.batches, each[0], length=sum(each), shards=processes, limit=self.feed.limit
            )
        self._knows_samples = self.exact and self.calendar.is_planned and self.calendar.counts_samples
        self._processes = processes

    def window(self, number: int) -> int | None:
        """Return the samples in window `number`, which counts from 0; None if unknown."""
        if not self._knows_samples:
            return None
        return self.calendar.after(number + 1).samples - self.calendar.after(number).samples or None

    @property
    def has_single_sample(self) -> bool:
        """Return whether the last micro-batch is known to have one sample in one process."""
        calendar, processes = self.calendar, self._processes
        if not (self._knows_samples and self.batches) or len(calendar.batch_size) > 1:
            return False
        whole = (self.batches - 1) * calendar.batch_size.first * processes
        return calendar.after(calendar.windows_in(0)).samples - whole < 2 * processes

    @property
    def last_window(self) -> tuple[int | None, int | None]:
        """Return the micro-batches and samples of the last window, if all epochs have as many windows."""
        steps = self.calendar.steps_per_epoch
        if not steps:
            return None, None
        return self.calendar.rounds_in(0) - self.calendar.after(steps - 1).rounds, self.window(steps - 1)

    def knows(self, every: Every) -> bool:
        """Return whether it is known beforehand after which steps an interval ends."""
        if every.unit == "samples":
            largest = most(self.calendar.batches) * most(self.calendar.batch_size) * self._processes
            return self._knows_samples and every.amount >= largest  # a step that passes two ends is due once
        in_steps = every.unit == "steps" or bool(every.steps)
        return (in_steps and self.calendar.is_planned) or (
            every.unit == "epochs" and self.calendar.length is not None
        )

    def after(self, steps: int) -> Progress:
        """Return the counts after so many steps."""
        at = self.calendar.after(steps)
        within = steps - self.calendar.windows_before(at.epoch)
        return Progress(steps=steps, epoch=at.epoch, epoch_steps=within, samples=at.samples)


def firings(trigger: Trigger, epoch: Epoch, length: RunLength) -> Firings:
    """Compute when a trigger is due in a run, from the ends that it has passed after each step."""
    if trigger.every is None:
        return Firings(None, 0)
    every, begins = str(trigger.every), trigger.begins
    asked = [trigger.every, *([] if begins is None else [begins.begins])]
    if trigger.ends_epochs:
        every = f"{every} and the end of each epoch"
        asked.append(Every("1 epoch"))
    if not all(map(epoch.knows, asked)):
        return Firings(every, None, 1 if trigger.first_step else None)
    steps, before = range(_ENDLESS + 1 if length.steps is None else length.steps + 1), 0
    if begins is not None:
        start = bisect_left(steps, True, key=lambda each: begins.reached(epoch.after(each)))
        before = trigger.passed(epoch.after(max(0, start - 1)))

    def passed(steps: int) -> int:
        return max(0, trigger.passed(epoch.after(steps)) - before)

    ends = passed(steps[-1])
    first = bisect_left(steps, 1, key=passed) if ends else None
    if length.steps is None:
        return Firings(every, None, first)
    times = ends - _ends_that_coincide(trigger, epoch, length.steps)
    return Firings(every, times, first, bisect_left(steps, ends, key=passed) if ends else None)


def _ends_that_coincide(trigger: Trigger, epoch: Epoch, steps: int) -> int:
    """Return how many ends of an interval fall where it is due anyway: the first step, ends of epochs."""
    assert trigger.every is not None
    found = int(trigger.first_step and steps > 0 and trigger.passed(epoch.after(1)) > 1)
    if not trigger.ends_epochs:
        return found
    every, per_epoch, calendar = int(trigger.every.amount), epoch.calendar.steps_per_epoch, epoch.calendar
    if per_epoch:
        return found + steps // math.lcm(every, per_epoch)
    epochs = range(1, calendar.after(steps).epoch + 1)
    return found + sum(calendar.windows_before(each) % every == 0 for each in epochs)


def and_at_the_end(points: Firings, steps: int | None) -> Firings:
    """Add a save at the end of the run, unless one is due there already."""
    every = _AT_END if points.every is None else f"{points.every} and {_AT_END}"
    if steps is None or points.times is None:
        return Firings(every, None, points.first)
    return Firings(
        every, points.times + (points.last != steps), steps if points.first is None else points.first, steps
    )
