"""The length of a fit and the updates at which its intervals are due, computed without reading any data."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain.data import Feed, Share, Transfer, as_source, batch_size
from drivetrain.data.split import AlreadySplit
from drivetrain.run import Totals
from drivetrain.task import TaskModule, measure_of
from drivetrain.types import Every, part_of_epoch

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_AT_END = "the end of the run"
_ENDLESS = 2**40  # updates that stand for a run of unknown length


@dataclass(frozen=True)
class Firings:
    """The updates after which an interval is due, counted from 1 like `Progress.updates` after an update.

    Attributes:
        every: The interval, or None for never.
        times: How often in the run; None when that is not known beforehand.
        first: The update after which it is first due, or None.
        last: The update after which it is last due, or None.
    """

    every: str | None
    times: int | None
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        if self.every is None:
            return "never"
        if self.times is None:
            first = "" if self.first is None else f", first after update {self.first:,}"
            return f"{self.every}{first}; how often is not known"
        if not self.times:
            return f"{self.every}: never in this run"
        if self.times == 1:
            return f"{self.every}: once, after update {self.first:,}"
        return f"{self.every}: {self.times:,} times, after updates {self.first:,} to {self.last:,}"


class Epoch:
    """The micro-batches and windows of an epoch, without reading any.

    Attributes:
        feed: The data as a run would feed it.
        batches: Micro-batches, or None.
        updates: Windows, or None.
        exact: Whether the data's length can be relied on.
    """

    def __init__(self, trainer: Trainer, task: TaskModule, data: Any) -> None:
        self._processes = trainer.select_strategy().data_size
        source = as_source(
            data, "training", trainer.seed, batch_size=trainer.batch_size, shuffle=True,
            share=Share(0, self._processes),
        )  # fmt: skip
        self._accumulation = trainer.gradient_accumulation_steps
        transfer = Transfer(torch.device("cpu"))
        self.feed = Feed(source, transfer, measure_of(task), self._accumulation, trainer.limit_train_batches)
        self.batches = self.feed.batches_per_epoch
        self.updates = self.feed.updates_per_epoch
        self.exact = source.exact and not source.apart  # the other processes' parts are not known here
        data = data.data if isinstance(data, AlreadySplit) else data
        self._samples_in = _sample_counter(data, trainer.batch_size) if self.exact else None

    def windows_samples(self, windows: int) -> int | None:
        """Return the samples of all processes in an epoch's first windows; None when unknown."""
        if self.batches is None or self._samples_in is None:
            return None
        return self._samples_in(min(windows * self._accumulation, self.batches) * self._processes)

    def window(self, number: int) -> int | None:
        """Return the samples in window `number`, which counts from 0."""
        before, after = self.windows_samples(number), self.windows_samples(number + 1)
        return None if before is None or not after else after - before

    @property
    def has_single_sample(self) -> bool:
        """Whether the last micro-batch is known to have one sample in one process."""
        if self._samples_in is None or not self.batches:
            return False
        end = self.batches * self._processes
        return self._samples_in(end) - self._samples_in(end - self._processes) < 2 * self._processes

    @property
    def last_window(self) -> tuple[int | None, int | None]:
        """Micro-batches and samples in the last window."""
        if not self.batches or not self.updates:
            return None, None
        return self.batches - (self.updates - 1) * self._accumulation, self.window(self.updates - 1)


def _sample_counter(data: Any, given: int | None) -> Callable[[int], int] | None:
    """Return the function from a number of batches to the samples in the first so many of them."""
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


def firings(interval: Every | None, epoch: Epoch, totals: Totals) -> Firings:
    """Compute when an interval is due in a run, from how often it has passed after each update."""
    if interval is None:
        return Firings(None, 0)
    passed = _passed(interval, epoch, totals.updates_per_epoch)
    if passed is None:
        return Firings(str(interval), None)
    updates = range(_ENDLESS + 1 if totals.updates is None else totals.updates + 1)
    times = passed(updates[-1])
    first = bisect_left(updates, 1, key=passed) if times else None
    if totals.updates is None:
        return Firings(str(interval), None, first)
    return Firings(str(interval), times, first, bisect_left(updates, times, key=passed) if times else None)


def _passed(interval: Every, epoch: Epoch, per_epoch: int | None) -> Callable[[int], int] | None:
    """Return the function from updates made to the times that an interval was due; None when unknown."""
    if interval.unit == "steps":
        return lambda updates: updates // int(interval.amount)
    if per_epoch is None or epoch.updates is None:
        return None
    if interval.unit == "samples":
        window, total = epoch.window(0), epoch.windows_samples(per_epoch)
        if window is None or total is None or interval.amount < window:
            return None  # an update that passes two multiples is due once
        return lambda updates: int(
            (updates // per_epoch * total + (epoch.windows_samples(updates % per_epoch) or 0))
            / interval.amount
        )
    if interval.unit != "epochs":
        return None
    if interval.amount == int(interval.amount):
        return lambda updates: updates // per_epoch // int(interval.amount)
    part: Fraction = part_of_epoch(interval, per_epoch)
    return lambda updates: updates // per_epoch * int(per_epoch / part) + int(updates % per_epoch / part)


def and_at_the_end(points: Firings, updates: int | None) -> Firings:
    """A run that ends is saved once more, unless it just was."""
    every = _AT_END if points.every is None else f"{points.every} and {_AT_END}"
    if updates is None or points.times is None:
        return Firings(every, None, points.first)
    return Firings(every, points.times + (points.last != updates), points.first or updates, updates)
