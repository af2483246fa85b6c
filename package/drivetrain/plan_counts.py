"""How long a fit is and when its intervals are due, counted without reading any data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain.data import Feed, Share, Transfer, as_source, batch_size
from drivetrain.data.split import AlreadySplit
from drivetrain.progress import Progress
from drivetrain.run import Totals
from drivetrain.task import TaskModule, measure_of
from drivetrain.types import Every, Trigger

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_COUNTED = 2_000_000  # updates that are played through to count intervals: about two seconds
_TRIED = 10_000  # updates that are tried for the first firing when the run's length is not known
_AT_END = "the end of the run"


@dataclass(frozen=True)
class Firings:
    """When an interval is due. Updates count from 1, as `Progress.updates` does after each.

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
        self._ready = isinstance(data, (list, tuple))
        of_batch = _sample_counter(data, trainer.batch_size) if self.exact else None
        self._size = of_batch if of_batch is None or self._processes == 1 else self._of_round(of_batch, data)

    def _of_round(self, of_batch: Callable[[int], int], data: Any) -> Callable[[int], int]:
        """Samples of all processes together in a micro-batch of each."""
        size, batches = self._processes, len(data) if hasattr(data, "__getitem__") and self._ready else None

        def of_round(number: int) -> int:
            last = (number + 1) * size if batches is None else min((number + 1) * size, batches)
            return sum(max(0, of_batch(each)) for each in range(number * size, last))

        return of_round

    def samples(self, number: int) -> int | None:
        """Samples in micro-batch `number` (from 0) of all processes; None when that is not known without
        reading it.
        """
        return None if self._size is None else self._size(number)

    def window(self, number: int) -> int | None:
        """Samples in window `number` (from 0)."""
        if self.batches is None or self._size is None:
            return None
        first = number * self._accumulation
        return sum(self._size(each) for each in range(first, min(first + self._accumulation, self.batches)))

    @property
    def has_single_sample(self) -> bool:
        """Whether a micro-batch is known to have one sample only."""
        return any(each < 2 * self._processes for each in self._sizes())

    def has_single_part(self, micro_batch: int) -> bool:
        """Whether a part of at most `micro_batch` samples of a process's batch is known to have one only."""
        # Parts are even, so that of 3 and more at once none is left alone.
        least = (each // self._processes for each in self._sizes())
        return any(each > 1 and (micro_batch == 1 or (micro_batch == 2 and each % 2)) for each in least)

    def _sizes(self) -> Sequence[int]:
        """Samples of all processes together in the micro-batches that may differ."""
        if self._size is None or not self.batches:
            return ()
        return [self._size(each) for each in (range(self.batches) if self._ready else (0, self.batches - 1))]

    @property
    def largest_window(self) -> int | None:
        """Samples in the largest window; only ready batches can differ before the last."""
        if self._size is None or not self.updates:
            return None
        return max(self.window(each) or 0 for each in range(self.updates if self._ready else 1))

    @property
    def last_window(self) -> tuple[int | None, int | None]:
        """Micro-batches and samples in the last window."""
        if not self.batches or not self.updates:
            return None, None
        return self.batches - (self.updates - 1) * self._accumulation, self.window(self.updates - 1)


def _sample_counter(data: Any, given: int | None) -> Callable[[int], int] | None:
    if isinstance(data, (list, tuple)):
        sizes = [batch_size(each) for each in data]
        known = [each for each in sizes if each is not None]
        return known.__getitem__ if len(known) == len(sizes) else None
    if isinstance(data, DataLoader):
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
    return lambda number: min(size, samples - number * size)


def play(epoch: Epoch, totals: Totals, *intervals: Every | None) -> list[Firings]:
    """Play the run's counts through the triggers; the last is the saver's, asked when an epoch is closed."""
    per_epoch, updates = totals.updates_per_epoch, totals.updates
    triggers = [Trigger(each, per_epoch) for each in intervals]
    counts_samples = any(each is not None and each.unit == "samples" for each in intervals)
    due: list[list[int]] = [[] for _ in intervals]
    progress = Progress()
    for number in range(1, min(_TRIED if updates is None else updates, _COUNTED) + 1):
        progress.updates = number
        if counts_samples:
            progress.samples += epoch.window(progress.epoch_updates) or 0
        progress.epoch_updates += 1
        ended = progress.epoch_updates == per_epoch
        progress.epoch += ended
        for trigger, found in zip(triggers[:-1], due, strict=False):
            if trigger.due(progress, ended):
                found.append(number)
        if ended:
            progress.epoch_updates = 0
        if triggers[-1].due(progress, ended):
            due[-1].append(number)
    played = updates is not None and updates <= _COUNTED
    return [
        _firings(each, found, played and _playable(each, epoch))
        for each, found in zip(intervals, due, strict=True)
    ]


def _playable(interval: Every | None, epoch: Epoch) -> bool:
    if interval is None or interval.unit == "steps":
        return True
    if interval.unit == "samples":
        return epoch.samples(0) is not None
    return interval.unit == "epochs" and epoch.updates is not None


def _firings(interval: Every | None, due: Sequence[int], known: bool) -> Firings:
    if interval is None:
        return Firings(None, 0)
    first = due[0] if due else None
    return (
        Firings(str(interval), len(due), first, due[-1] if due else None)
        if known
        else Firings(str(interval), None, first)
    )


def and_at_the_end(points: Firings, updates: int | None) -> Firings:
    """A run that ends is saved once more, unless it just was."""
    every = _AT_END if points.every is None else f"{points.every} and {_AT_END}"
    if updates is None or points.times is None:
        return Firings(every, None, points.first)
    return Firings(every, points.times + (points.last != updates), points.first or updates, updates)
