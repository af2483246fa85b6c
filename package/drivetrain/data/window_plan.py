"""The sizes of a run's windows where they change by schedule, without reading any data.

A round is a global micro-batch, one micro-batch on each process, and a window the rounds of one step.
A window's micro-batches, the samples of a batch and the length of sequences follow from the window's place:
its number in the run, its epoch, and the samples before it. So batches can be made ahead, and a resumed run
cuts the data as the uninterrupted one. Windows of equal size are counted by division.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import NamedTuple

from drivetrain.core.stages import Stages

_ENDLESS = 2**62


class Place(NamedTuple):
    """A place between two windows.

    Attributes:
        epoch: Its epoch.
        position: The samples before it in the epoch; or rounds of batches, see `WindowPlan`.
        rounds: The rounds of batches before it in the epoch.
        windows: The windows before it in the run, of steps made and skipped.
        samples: The samples before it in the run.
    """

    epoch: int = 0
    position: int = 0
    rounds: int = 0
    windows: int = 0
    samples: int = 0


class Stretch(NamedTuple):
    """Consecutive windows of equal size in one epoch; the epoch's last may be short.

    Attributes:
        start: The place before the first.
        end: The place after the last.
        batches: The micro-batches of a window on each process.
        batch_size: The samples of a micro-batch on each process; 1 if positions are rounds.
        length: The length of sequences; 0 if none is set.
    """

    start: Place
    end: Place
    batches: int
    batch_size: int
    length: int

    @property
    def rounds(self) -> int:
        return self.end.rounds - self.start.rounds


class WindowPlan:
    """The windows of a fit.

    Args:
        batches: The micro-batches of a window on each process.
        batch_size: The samples of a micro-batch on each process; 1 if positions are rounds.
        samples: The samples of an epoch; None if positions are rounds of batches.
        rounds: The rounds of an epoch if `samples` is None; None if unknown.
        shards: The number of processes that divide the data.
        limit: The maximum number of rounds in an epoch; None for all.

    Attributes:
        lengths: The length of sequences; None if none is set.
        varies: Whether windows differ in their samples or micro-batches.
        knows_length: Whether the length of an epoch is known.
    """

    def __init__(
        self,
        batches: Stages,
        batch_size: Stages,
        *,
        samples: int | None = None,
        rounds: int | None = None,
        shards: int = 1,
        limit: int | None = None,
    ) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.lengths: Stages | None = None
        self.counts_samples = samples is not None
        self.varies = len(batches) > 1 or len(batch_size) > 1
        self._length = rounds if samples is None else samples
        self.knows_length = self._length is not None
        self._shards = shards if self.counts_samples else 1
        self._limit = limit
        self._begun = Place()
        self._counted_epoch = -1, (0, 0)  # what was counted last: it is asked for after every step

    # Where the run is.

    def begin(self, at: Place) -> None:
        """Read on from a place; the rest of its epoch and whole epochs follow."""
        self._begun = at

    def windows(self) -> Iterator[tuple[int, bool]]:
        """Yield the micro-batches of each window from the place begun at to the end of its epoch, and whether
        it is the last.
        """
        for each in self._stretches(self._begun):
            whole, rest = divmod(each.rounds, each.batches)
            ends = not self._left(each.end, each.batch_size)
            for number in range(whole, 0, -1):
                yield each.batches, ends and number == 1 and not rest
            if rest:
                yield rest, True

    def endless(self) -> Iterator[int]:
        """Return the micro-batches of each window from the place begun at, for an epoch of unknown length."""
        return chain.from_iterable(
            repeat(each.batches, each.end.windows - each.start.windows)
            for each in self._stretches(self._begun, bounded=False)
        )

    def lengths_from(self, bounded: bool) -> Iterator[int]:
        """Return the length of the sequences of each micro-batch from the place begun at.

        Args:
            bounded: Whether the length of an epoch can be relied on.
        """
        stretches = self._stretches(self._begun, bounded)
        return chain.from_iterable(repeat(each.length, each.rounds) for each in stretches)

    def batch_sizes(self, epoch: int) -> Iterator[int]:
        """Return the samples of each micro-batch of an epoch, from the place begun at or of a later epoch."""
        at = self._begun if epoch == self._begun.epoch else self._start_of(epoch, self._begun)
        return chain.from_iterable(repeat(each.batch_size, each.rounds) for each in self._stretches(at))

    def batches_before(self, position: int) -> int:
        """Return the batches of all processes in the epoch that is read, before a position in samples."""
        begun = self._begun
        count, last = begun.rounds * self._shards, None
        for last in self._stretches(begun):
            if position < last.end.position:
                break
            count += last.rounds * self._shards
        if last is not None and last.start.position <= position < last.end.position:
            count += (position - last.start.position) // last.batch_size
        return count

    # The whole run.

    def windows_in(self, epoch: int) -> int:
        """Return the number of windows in an epoch of a run from its start."""
        return self._counts(epoch)[0]

    def rounds_in(self, epoch: int) -> int:
        """Return the number of rounds of batches in an epoch of a run from its start."""
        return self._counts(epoch)[1]

    def _counts(self, epoch: int) -> tuple[int, int]:
        if epoch != self._counted_epoch[0]:
            stretches = list(self._stretches(self._start_of(epoch, Place())))
            windows = sum(each.end.windows - each.start.windows for each in stretches)
            self._counted_epoch = epoch, (windows, sum(each.rounds for each in stretches))
        return self._counted_epoch[1]

    def windows_before(self, epoch: int) -> int:
        """Return the number of windows before an epoch of a run from its start."""
        return self._start_of(epoch, Place()).windows

    def after(self, windows: int) -> Place:
        """Return the place after so many windows of a run from its start, in O(number of changes)."""
        at = Place()
        for start, end, epochs in self._groups(at):
            each = end.windows - start.windows
            if not each or start.windows + each * epochs > windows:
                at = _repeated(start, end, (windows - start.windows) // each if each else 0)
                break
        for stretch in self._stretches(at):
            if stretch.end.windows >= windows:
                made = windows - stretch.start.windows
                rounds = min(made * stretch.batches, stretch.rounds)
                return self._moved(stretch.start, made, rounds, stretch.batch_size)
            at = stretch.end
        return at

    def _moved(self, at: Place, windows: int, rounds: int, size: int, bounded: bool = True) -> Place:
        """Return the place after so many windows and rounds of a batch size in the epoch of a place."""
        samples = rounds * size * self._shards
        if bounded and self._length is not None:
            samples = min(samples, self._length - at.position)
        return Place(
            at.epoch, at.position + samples, at.rounds + rounds, at.windows + windows, at.samples + samples
        )

    def _start_of(self, epoch: int, at: Place) -> Place:
        """Return the beginning of an epoch after the one of a place."""
        if at.epoch >= epoch:
            return at
        if at.position or at.rounds:
            at = self._end_of(at)
        for start, end, epochs in self._groups(at):
            if start.epoch + epochs > epoch:
                return _repeated(start, end, epoch - start.epoch)
        raise AssertionError("epochs do not end")

    def _groups(self, at: Place) -> Iterator[tuple[Place, Place, int]]:
        """Yield groups of equal epochs: the beginning and the end of the first, and their number."""
        while True:
            end = self._end_of(at)
            epochs = _ENDLESS
            for stages in self._stages():
                change = stages.next_start(_counted(stages, at))
                if change is not None:
                    left, each = change - _counted(stages, at), _counted(stages, end) - _counted(stages, at)
                    epochs = min(epochs, left // each if each else _ENDLESS)
            epochs = max(1, epochs)
            yield at, end, epochs
            at = _repeated(at, end, epochs)

    def _end_of(self, at: Place) -> Place:
        """Return the beginning of the next epoch."""
        for each in self._stretches(at):
            at = each.end
        return at._replace(epoch=at.epoch + 1, position=0, rounds=0)

    def _stretches(self, at: Place, bounded: bool = True) -> Iterator[Stretch]:
        """Yield the stretches of equal windows from a place to the end of its epoch."""
        while True:
            batches = self.batches.at(_counted(self.batches, at))
            size = self.batch_size.at(_counted(self.batch_size, at))
            length = 0 if self.lengths is None else self.lengths.at(_counted(self.lengths, at))
            left = self._left(at, size) if bounded else _ENDLESS
            if left <= 0:
                return
            windows = -(-left // batches)
            for stages in self._stages():
                windows = min(windows, _until_change(stages, at, batches * size * self._shards))
            rounds = min(windows * batches, left)
            end = self._moved(at, windows, rounds, size, bounded)
            yield Stretch(at, end, batches, size, length)
            at = end

    def _left(self, at: Place, size: int) -> int:
        """Return the rounds of batches of a size from a place to the end of its epoch."""
        left = _ENDLESS if self._length is None else -((at.position - self._length) // (size * self._shards))
        return left if self._limit is None else min(left, self._limit - at.rounds)

    def _stages(self) -> Iterator[Stages]:
        yield self.batches
        yield self.batch_size
        if self.lengths is not None:
            yield self.lengths


def _counted(stages: Stages, at: Place) -> int:
    """Return how many of a schedule's units are before a place."""
    return {"steps": at.windows, "epochs": at.epoch, "samples": at.samples}[stages.unit]


def _until_change(stages: Stages, at: Place, samples: int) -> int:
    """Return the windows from a place to the next change in its epoch."""
    done = _counted(stages, at)
    change = stages.next_start(done)
    if change is None or stages.unit == "epochs":
        return _ENDLESS
    return change - done if stages.unit == "steps" else -(-(change - done) // samples)


def _repeated(start: Place, end: Place, epochs: int) -> Place:
    """Return the beginning of the epoch after so many equal ones."""
    return Place(
        start.epoch + epochs,
        0,
        0,
        start.windows + epochs * (end.windows - start.windows),
        start.samples + epochs * (end.samples - start.samples),
    )
