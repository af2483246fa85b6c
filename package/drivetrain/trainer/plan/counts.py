"""The length of a fit and the steps at its intervals, computed without reading any data."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain.core.intervals import Every, exact, part_of_epoch
from drivetrain.core.stages import at_start
from drivetrain.core.totals import Totals
from drivetrain.data import Feed, Shard, Transfer, as_source, batch_size
from drivetrain.data.split_source import AlreadySplit
from drivetrain.data.window_plan import WindowPlan
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule, measure_of
from drivetrain.trainer.feeds import batch_sizes

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
    """The micro-batches and windows of an epoch, without reading any.

    Attributes:
        feed: The data as a run would feed it.
        batches: Micro-batches, or None; those of the first epoch if they change.
        steps: Windows, or None.
        plan: The windows, if they change by schedule.
        exact: Whether the data's length can be relied on.
    """

    def __init__(self, settings: RunSettings, task: TaskModule, data: Any) -> None:
        self._processes = settings.select_strategy().data_size
        size, sizes = at_start(settings.batch_size), batch_sizes(settings, data)
        source = as_source(
            data, "training", settings.seed, batch_size=size, shuffle=True, shard=Shard(0, self._processes)
        )
        transfer, steps = Transfer(torch.device("cpu")), settings.gradient_accumulation_steps
        self.feed = Feed(source, transfer, measure_of(task), steps, settings.limit_train_batches, sizes)
        self.plan = self.feed.plan
        self._accumulation = self.feed.accumulation
        self.batches = self.feed.batches_per_epoch
        self.steps = self.feed.steps_per_epoch
        self.exact = source.exact and not source.is_split  # the other processes' parts are not known here
        data = data.data if isinstance(data, AlreadySplit) else data
        self._samples_in = _sample_counter(data, size) if self.exact and sizes is None else None

    def windows_samples(self, windows: int) -> int | None:
        """Return the samples of all processes in an epoch's first windows; None when unknown."""
        if self.batches is None or self._samples_in is None:
            return None
        return self._samples_in(min(windows * self._accumulation, self.batches) * self._processes)

    def window(self, number: int) -> int | None:
        """Return the samples in window `number`, which counts from 0."""
        if self.plan is not None:
            if not (self.exact and self.plan.counts_samples):
                return None
            return self.plan.after(number + 1).samples - self.plan.after(number).samples
        before, after = self.windows_samples(number), self.windows_samples(number + 1)
        return None if before is None or not after else after - before

    @property
    def has_single_sample(self) -> bool:
        """Return whether the last micro-batch is known to have one sample in one process."""
        if self._samples_in is None or not self.batches:
            return False
        end = self.batches * self._processes
        return self._samples_in(end) - self._samples_in(end - self._processes) < 2 * self._processes

    @property
    def last_window(self) -> tuple[int | None, int | None]:
        """Return the micro-batches and samples of the last window."""
        if not self.batches or not self.steps:
            return None, None
        return self.batches - (self.steps - 1) * self._accumulation, self.window(self.steps - 1)


def _sample_counter(data: Any, given: int | None) -> Callable[[int], int] | None:
    """Return a function from a number of batches to the number of samples in them."""
    if isinstance(data, (list, tuple)):
        sizes = [batch_size(each) or 0 for each in data]
        size, samples = sizes[0], sum(sizes)
        if set(sizes[:-1]) - {size} or not 0 < sizes[-1] <= size:
            return None
    elif isinstance(data, DataLoader):
        if type(data.batch_sampler) is not BatchSampler or data.batch_size is None:
            return None  # the dataset or a sampler of the user's makes the batches
        size = data.batch_size
        try:
            samples = len(data.sampler)  # type: ignore[arg-type]
        except TypeError:
            return None
        if data.drop_last:
            samples -= samples % size
    else:
        size, samples = int(getattr(data, "batch_size", None) or given or 1), len(data)
    return lambda batches: min(batches * size, samples)


def firings(
    interval: Every | None,
    epoch: Epoch,
    totals: Totals,
    *,
    begins: Every | None = None,
    first: bool = False,
    ends_epochs: bool = False,
) -> Firings:
    """Compute when an interval is due in a run, from the number of times it has passed after each step.

    Args:
        begins: The point before which nothing is due.
        first: Whether the first step is due too.
        ends_epochs: Whether an interval of steps is due at the end of every epoch too.
    """
    if interval is None:
        return Firings(None, 0)
    every, passed = str(interval), _passed(interval, epoch, totals.steps_per_epoch)
    if ends_epochs and interval.unit == "steps":
        every = f"{every} and the end of each epoch"
        passed = _with_epochs(int(interval.amount), epoch, totals.steps_per_epoch)
    if passed is not None and begins is not None:
        passed = _passed_since(begins, passed, epoch, totals.steps_per_epoch)
    if passed is None:
        return Firings(every, None, 1 if first else None)
    if first and not passed(1):
        passed = _with_first(passed)
    steps = range(_ENDLESS + 1 if totals.steps is None else totals.steps + 1)
    times = passed(steps[-1])
    due_first = bisect_left(steps, 1, key=passed) if times else None
    if totals.steps is None:
        return Firings(every, None, due_first)
    return Firings(every, times, due_first, bisect_left(steps, times, key=passed) if times else None)


def _passed(interval: Every, epoch: Epoch, per_epoch: int | None) -> Callable[[int], int] | None:
    """Return a function from steps made to the times that an interval was due; None when unknown."""
    if interval.unit == "steps":
        return lambda steps: steps // int(interval.amount)
    if epoch.plan is not None:
        return _passed_by_plan(interval, epoch.plan)
    if per_epoch is None or epoch.steps is None:
        return None
    if interval.unit == "samples":
        window, total = epoch.window(0), epoch.windows_samples(per_epoch)
        if window is None or total is None or interval.amount < window:
            return None  # a step that passes two multiples is due once
        return lambda steps: int(
            (steps // per_epoch * total + (epoch.windows_samples(steps % per_epoch) or 0)) / interval.amount
        )
    if interval.unit != "epochs":
        return None
    if interval.amount == int(interval.amount):
        return lambda steps: steps // per_epoch // int(interval.amount)
    part: Fraction = part_of_epoch(interval, per_epoch)
    return lambda steps: steps // per_epoch * int(per_epoch / part) + int(steps % per_epoch / part)


def _passed_by_plan(interval: Every, plan: WindowPlan) -> Callable[[int], int] | None:
    """Do what `_passed` does where windows change by schedule."""
    whole = interval.amount == int(interval.amount)
    if interval.unit == "epochs" and whole and plan.knows_length:
        return lambda steps: plan.after(steps).epoch // int(interval.amount)
    return None


def _passed_since(
    begins: Every, passed: Callable[[int], int], epoch: Epoch, per_epoch: int | None
) -> Callable[[int], int] | None:
    """Return `passed` without the times before a point of the run; None if the point is not known."""
    if begins.unit == "epochs" and per_epoch is not None:
        start = math.ceil(exact(begins.amount) * per_epoch)
    else:
        reached = _passed(begins, epoch, per_epoch)
        if reached is None:
            return None
        start = bisect_left(range(_ENDLESS), 1, key=reached)
    return lambda steps: max(0, passed(steps) - passed(start - 1))


def _with_epochs(every: int, epoch: Epoch, per_epoch: int | None) -> Callable[[int], int] | None:
    """Return `_passed` for a number of steps and the ends of epochs; None if no epoch has a known length."""
    ends, plan = _passed(Every("1 epoch"), epoch, per_epoch), epoch.plan
    if ends is None or per_epoch is None:
        return None

    def both(steps: int) -> int:
        if plan is None:
            return steps // math.lcm(every, per_epoch)
        return sum(plan.windows_before(each) % every == 0 for each in range(1, ends(steps) + 1))

    return lambda steps: steps // every + ends(steps) - both(steps)


def _with_first(passed: Callable[[int], int]) -> Callable[[int], int]:
    return lambda steps: passed(steps) + (steps > 0)


def and_at_the_end(points: Firings, steps: int | None) -> Firings:
    """Add a save at the end of the run, unless one is due there already."""
    every = _AT_END if points.every is None else f"{points.every} and {_AT_END}"
    if steps is None or points.times is None:
        return Firings(every, None, points.first)
    return Firings(every, points.times + (points.last != steps), points.first or steps, steps)
