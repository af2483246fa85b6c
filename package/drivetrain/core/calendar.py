"""The calendar of a fit: its windows and its length, known without reading any data, and what is due when.

A round is a global micro-batch, one micro-batch on each process, and a window the rounds of one step.
A window's micro-batches, the samples of a batch and the length of sequences follow from the window's
position: its number in the run, its epoch, and the samples before it. So batches can be made ahead, and a
resumed run cuts the data as the uninterrupted one. Windows of equal size are counted by division.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, repeat, takewhile
from typing import Any, NamedTuple

from drivetrain.core.errors import ConfigError
from drivetrain.core.int_schedule import IntSchedule
from drivetrain.core.intervals import COUNTS, LOG_SPACED, Every, exact, log_spaced_steps
from drivetrain.core.progress import Progress

_ENDLESS = 2**62


class RunPosition(NamedTuple):
    """A position in a run, between two windows.

    Attributes:
        epoch: Its epoch.
        position: The samples before it in the epoch; or rounds of batches, see `Calendar`.
        rounds: The rounds of batches before it in the epoch.
        windows: The windows before it in the run, of steps made and skipped.
        samples: The samples before it in the run.
    """

    epoch: int = 0
    position: int = 0
    rounds: int = 0
    windows: int = 0
    samples: int = 0


class Segment(NamedTuple):
    """Consecutive windows of equal size in one epoch; the epoch's last may be short.

    Attributes:
        start: The position before the first.
        end: The position after the last.
        batches: The micro-batches of a window on each process, or a schedule of them.
        batch_size: The samples of a micro-batch on each process, or a schedule; 1 if positions are rounds.
        length: The length of sequences.
    """

    start: RunPosition
    end: RunPosition
    batches: int
    batch_size: int
    length: int

    @property
    def rounds(self) -> int:
        return self.end.rounds - self.start.rounds


class Calendar:
    """The windows of a fit.

    Args:
        batches: The micro-batches of a window on each process, or a schedule of them.
        batch_size: The samples of a micro-batch on each process, or a schedule; 1 if positions are rounds.
        length: The samples of an epoch, or its rounds; None if it is unknown.
        counts_samples: Whether positions are samples, and not rounds of batches.
        shards: The number of processes that divide the samples.
        limit: The maximum number of rounds in an epoch; None for all.
        drop_last: Whether samples that fill no batch are left out.
        exact: Whether the length can be relied on; else an epoch is read until its data ends.

    Attributes:
        lengths: The length of sequences, if a callback cuts them.
        begun: The position where the run goes on.
        whole: The length of the run in steps, or in the tokens that limit it; None if it is unknown.
        counts_tokens: Whether the task counts tokens.
        needs_tokens: Whether an interval or the length of the run is in tokens.
    """

    def __init__(
        self,
        batches: Mapping[Any, int] | int = 1,
        batch_size: Mapping[Any, int] | int = 1,
        *,
        length: int | None = None,
        counts_samples: bool = True,
        shards: int = 1,
        limit: int | None = None,
        drop_last: bool = False,
        exact: bool = True,
    ) -> None:
        self.batches = IntSchedule("gradient_accumulation_steps", batches)
        self.batch_size = IntSchedule("batch_size", batch_size)
        self.lengths = IntSchedule("lengths", 1)
        self.counts_samples = counts_samples
        self.length = length if self.is_planned else None
        self._shards = shards if counts_samples else 1
        self._limit = limit
        self._drop_last = drop_last
        self._exact = exact
        self.begun = RunPosition()
        self.whole: Every | None = None
        self.counts_tokens = True
        self.needs_tokens = False

    @property
    def is_planned(self) -> bool:
        """Whether the points of `batches` are known beforehand; if not, the windows follow the run's counts,
        and the length of an epoch counts as unknown.
        """
        return self.batches.unit != "tokens" and (self.batches.unit != "samples" or self.counts_samples)

    @property
    def varies(self) -> bool:
        """Whether windows differ in their samples or micro-batches."""
        return len(self.batches) > 1 or len(self.batch_size) > 1

    @property
    def steps_per_epoch(self) -> int | None:
        """The windows of each epoch, if all have as many and the length of an epoch is known."""
        return None if self.varies or self.length is None else self.windows_in(0)

    # Where the run is.

    def batches_now(self, progress: Progress) -> int:
        """Return the micro-batches of the next window, by the counts of a run."""
        now = {"steps": progress.steps + progress.skipped, "epochs": progress.epoch}
        unit = self.batches.unit
        return self.batches.at(now[unit] if unit in now else getattr(progress, unit))

    def windows(self) -> Iterator[tuple[int, bool]]:
        """Return the micro-batches of each window from the position begun at, and whether it is the last."""
        return chain.from_iterable(map(self._sizes, self._segments(self.begun, self._exact)))

    def _sizes(self, of: Segment) -> Iterator[tuple[int, bool]]:
        before = of.end.windows - of.start.windows - 1
        last = of.rounds - before * of.batches, not self._left(of.end)
        return chain(repeat((of.batches, False), before), (last,))

    def sequence_lengths(self) -> Iterator[int]:
        """Return the length of the sequences of each micro-batch from the position begun at."""
        segments = self._segments(self.begun, self._exact)
        return chain.from_iterable(repeat(each.length, each.rounds) for each in segments)

    def batch_sizes(self, epoch: int) -> Iterator[int]:
        """Return the samples of each micro-batch of the epoch begun at, from there on, or of a later one."""
        at = self.begun if epoch == self.begun.epoch else self._start_of(epoch, self.begun)
        return chain.from_iterable(repeat(each.batch_size, each.rounds) for each in self._segments(at))

    def batches_before(self, position: int) -> int:
        """Return the batches of all processes in the epoch that is read, before a position in samples."""
        for each in self._segments(self.begun):
            if position < each.end.position:
                before = each.start.rounds * self._shards
                return before + (position - each.start.position) // each.batch_size
        return self._last_of(self.begun).rounds * self._shards

    # The whole run.

    def windows_in(self, epoch: int) -> int:
        """Return the number of windows in an epoch of a run from its start."""
        start = self._start_of(epoch, RunPosition())
        return self._last_of(start).windows - start.windows

    def rounds_in(self, epoch: int) -> int:
        """Return the number of rounds of batches in an epoch of a run from its start."""
        return self._last_of(self._start_of(epoch, RunPosition())).rounds

    def windows_before(self, epoch: int) -> int:
        """Return the number of windows before an epoch of a run from its start."""
        return self._start_of(epoch, RunPosition()).windows

    def after(self, windows: int) -> RunPosition:
        """Return the position after so many windows of a run from its start, in O(number of changes)."""
        at = RunPosition()
        for start, end, epochs in self._groups(at):
            each = end.windows - start.windows
            if not each or start.windows + each * epochs > windows:
                at = _repeated(start, end, (windows - start.windows) // each if each else 0)
                break
        for segment in self._segments(at):
            if segment.end.windows >= windows:
                made = windows - segment.start.windows
                rounds = min(made * segment.batches, segment.rounds)
                return self._moved(segment.start, made, rounds, segment.batch_size)
            at = segment.end
        return at

    def resolved(self, every: Every) -> Every:
        """Return an interval, a part of the run as the steps or tokens that it is.

        Raises:
            ConfigError: The length of the run is unknown, or tokens are not counted.
        """
        if every.unit == LOG_SPACED:
            if self.whole is None or self.whole.unit != "steps":
                raise ConfigError(
                    f"'{every}' need the number of steps of the run, which is not known. Give the Trainer"
                    " max_steps, or max_epochs with data of known length; or list the steps"
                )
            return Every(log_spaced_steps(int(every.amount), int(self.whole.amount)))
        if every.unit == "runs":
            if self.whole is None:
                raise ConfigError(
                    f"'{every}' is a part of the run, whose length is not known. Give the Trainer max_steps,"
                    " max_tokens, or max_epochs with data of known length; or give another interval"
                )
            return Every(max(1, math.ceil(exact(every.amount) * int(self.whole.amount))), self.whole.unit)
        if every.unit == "tokens" and not self.counts_tokens:
            raise ConfigError(
                f"'{every}' cannot be counted, because the task does not count its tokens. Define"
                " tokens(self, batch) in it, such as `return batch['input_ids'].numel()`"
            )
        self.needs_tokens = self.needs_tokens or every.unit == "tokens"
        return every

    def step_of(self, every: Every) -> int:
        """Return the windows of a run from its start to the end of so many steps or epochs."""
        if every.unit == "steps":
            return int(every.amount)
        whole, part = divmod(exact(every.amount), 1)
        before = self.windows_before(int(whole))
        return before + math.ceil(part * self.windows_in(int(whole))) if part else before

    def parts_of(self, epoch: int, part: Fraction) -> tuple[int, Fraction]:
        """Return how many parts of epochs end before an epoch, and the windows of a part in it."""
        before = takewhile(lambda group: group[0].epoch < epoch, self._groups(RunPosition()))
        ends = (
            min(end.windows - start.windows, int(1 / part)) * min(epochs, epoch - start.epoch)
            for start, end, epochs in before
        )
        # Exact: rounding would put 0.3 epochs of 10 steps at the fourth.
        return sum(ends), max(Fraction(1), part * self.windows_in(epoch))

    def _moved(
        self, at: RunPosition, windows: int, rounds: int, size: int, bounded: bool = True
    ) -> RunPosition:
        """Return the position after so many windows and rounds of a batch size in the epoch of a position."""
        samples = rounds * size * self._shards
        position = at.position + samples
        if bounded and self.length is not None:
            left = self.length - at.position
            usable = left - left % size if self._drop_last else left
            if samples > usable:
                samples, position = usable, self.length
        return RunPosition(at.epoch, position, at.rounds + rounds, at.windows + windows, at.samples + samples)

    def _start_of(self, epoch: int, at: RunPosition) -> RunPosition:
        """Return the beginning of an epoch after the one of a position."""
        if at.epoch >= epoch:
            return at
        if at.position or at.rounds:
            at = self._end_of(at)
        for start, end, epochs in self._groups(at):
            if start.epoch + epochs > epoch:
                return _repeated(start, end, epoch - start.epoch)
        raise AssertionError("epochs do not end")

    def _groups(self, at: RunPosition) -> Iterator[tuple[RunPosition, RunPosition, int]]:
        """Yield groups of equal epochs: the beginning and the end of the first, and their number."""
        while True:
            end = self._end_of(at)
            epochs = _ENDLESS
            for schedule in (self.batches, self.batch_size, self.lengths):
                done = _counted(schedule, at)
                change, each = schedule.next_start(done), _counted(schedule, end) - done
                if change is not None and each:
                    epochs = min(epochs, (change - done) // each)
            epochs = max(1, epochs)
            yield at, end, epochs
            at = _repeated(at, end, epochs)

    def _end_of(self, at: RunPosition) -> RunPosition:
        """Return the beginning of the next epoch."""
        return self._last_of(at)._replace(epoch=at.epoch + 1, position=0, rounds=0)

    def _last_of(self, at: RunPosition) -> RunPosition:
        """Return the position after the last window of an epoch."""
        for each in self._segments(at):
            at = each.end
        return at

    def _segments(self, at: RunPosition, bounded: bool = True) -> Iterator[Segment]:
        """Yield the segments of equal windows from a position to the end of its epoch."""
        while True:
            batches = self.batches.at(_counted(self.batches, at))
            size = self.batch_size.at(_counted(self.batch_size, at))
            length = self.lengths.at(_counted(self.lengths, at))
            left = self._left(at) if bounded else _ENDLESS
            if left <= 0:
                return
            windows = -(-left // batches)
            for schedule in (self.batches, self.batch_size, self.lengths):
                windows = min(windows, _until_change(schedule, at, batches * size * self._shards))
            rounds = min(windows * batches, left)
            end = self._moved(at, windows, rounds, size, bounded)
            yield Segment(at, end, batches, size, length)
            at = end

    def _left(self, at: RunPosition) -> int:
        """Return the rounds of batches from a position to the end of its epoch, all of its batch size."""
        left = _ENDLESS - at.rounds
        if self.length is not None:
            samples, size = self.length - at.position, self.batch_size.at(_counted(self.batch_size, at))
            left = -(-(samples // size if self._drop_last else -(-samples // size)) // self._shards)
        return left if self._limit is None else min(left, self._limit - at.rounds)


def _counted(schedule: IntSchedule, at: RunPosition) -> int:
    """Return how many of a schedule's units are before a position."""
    return {"steps": at.windows, "epochs": at.epoch, "samples": at.samples}[schedule.unit]


def _until_change(schedule: IntSchedule, at: RunPosition, samples: int) -> int:
    """Return the windows from a position to the next change in its epoch."""
    done = _counted(schedule, at)
    change = schedule.next_start(done)
    if change is None or schedule.unit == "epochs":
        return _ENDLESS
    return change - done if schedule.unit == "steps" else -(-(change - done) // samples)


def _repeated(start: RunPosition, end: RunPosition, epochs: int) -> RunPosition:
    """Return the beginning of the epoch after so many equal ones."""
    windows, samples = end.windows - start.windows, end.samples - start.samples
    return RunPosition(
        start.epoch + epochs, 0, 0, start.windows + epochs * windows, start.samples + epochs * samples
    )


@dataclass(frozen=True)
class RunLength:
    """The planned length of a fit, and how its steps are made; None where it is unknown beforehand.

    Attributes:
        steps: Steps in the whole run.
        epochs: Epochs in the whole run, the last of them begun.
        steps_per_epoch: Steps in an epoch, if all have as many.
        max_steps: The limit that was set, if one was.
        max_seconds: The limit of wall time, if one was set.
        max_epochs: The limit of epochs that was set, if one was; it may be a fraction.
        max_tokens: The limit of tokens over all processes, if one was set.
        end: The epoch, and the number of micro-batches in it, at which `max_epochs` is reached.
        gradient_accumulation_steps: Micro-batches per step on each process, if a fit has begun; the largest
            number if it changes.
        samples_per_step: Samples of a full step over all processes, at the start if they change.
        world_size: The number of processes, if a fit has begun.
        min_steps: The steps before which no callback stops the fit.
        calendar: The windows of the fit; `calendar.windows_in(epoch)` are the steps of an epoch.
    """

    steps: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    max_seconds: float | None = None
    max_epochs: float | None = None
    max_tokens: int | None = None
    end: tuple[int, int] | None = None
    gradient_accumulation_steps: int | None = None
    samples_per_step: int | None = None
    world_size: int | None = None
    min_steps: int = 0
    calendar: Calendar = field(default_factory=Calendar, compare=False, repr=False)

    def limit_reached(self, progress: Progress) -> str | None:
        """Return the limit that is reached, which is the same on all ranks; None if the fit may go on."""
        if self.max_steps is not None and progress.steps >= self.max_steps:
            return f"max_steps={self.max_steps} reached"
        if self.max_seconds is not None and progress.seconds >= self.max_seconds:
            return f"max_time={self.max_seconds:g} seconds reached"
        if self.max_tokens is not None and progress.tokens >= self.max_tokens:
            return f"max_tokens={self.max_tokens} reached"
        if self.end is not None and (progress.epoch, progress.epoch_batches) >= self.end:
            return f"max_epochs={self.max_epochs} reached"
        return None

    def is_early(self, progress: Progress) -> bool:
        """Return whether callbacks may not stop the fit yet."""
        return progress.steps < self.min_steps

    def epochs_until(self, progress: Progress) -> int | None:
        """Return the end of the range of epochs that a fit reads from `progress` on; None if unknown."""
        calendar, until = self.calendar, self.epochs
        if self.max_steps is None or calendar.length is None:
            return until
        left = self.max_steps - progress.steps + progress.epoch_steps
        end = calendar.after(calendar.windows_before(progress.epoch) + left)
        last = end.epoch + (end.rounds > 0)
        return last if until is None else min(until, last)


class Point:
    """A point of a run, given as the interval from its start. It follows from the progress alone."""

    def __init__(self, begins: Every, calendar: Calendar) -> None:
        self.begins = begins = calendar.resolved(begins)
        if begins.steps:
            raise ConfigError(f"{begins} are several steps; give one point, such as '2 epochs' or 500")
        self._whole, self._part = divmod(exact(begins.amount), 1)
        if self._part and begins.unit == "epochs":
            if calendar.length is None:
                raise ConfigError(
                    f"{begins} from the start need data of known length; give whole epochs or a number of"
                    " steps"
                )
            self._part *= calendar.windows_in(int(self._whole))

    def reached(self, progress: Progress, epoch_ended: bool = False) -> bool:
        """Return whether the run is at the point, or past it; see `Trigger.due`."""
        if self.begins.unit == "epochs":
            done = 0 if epoch_ended else progress.epoch_steps
            return (progress.epoch, done) >= (self._whole, self._part)
        counter = COUNTS.get(self.begins.unit, "seconds")
        return bool(getattr(progress, counter) >= (self.begins.seconds or self.begins.amount))


class Trigger:
    """When an `Every` is due. The times follow from the progress alone, so a restart moves none.

    Args:
        every: The interval; None is never due.
        calendar: The windows of the fit, for parts of an epoch.
        begins: The point before which nothing is due, as the interval from the run's start.
        first_step: Whether the first step of a run is due too.
        ends_epochs: Whether an interval of steps is due at the end of every epoch too.

    Attributes:
        by_time: Whether `due` depends on the run's seconds.
    """

    def __init__(
        self,
        every: Every | None,
        calendar: Calendar | None = None,
        *,
        begins: Every | None = None,
        first_step: bool = False,
        ends_epochs: bool = False,
    ) -> None:
        self._calendar = calendar = calendar or Calendar()
        self.every = every = None if every is None else calendar.resolved(every)
        self.begins = None if begins is None else Point(begins, calendar)
        self.first_step = self._awaits_first = first_step
        self.ends_epochs = ends_epochs
        self.by_time = any(each is not None and each.seconds is not None for each in (every, begins))
        unit, amount = ("", math.inf) if every is None else (every.unit, every.seconds or every.amount)
        self._counter, self._amount = COUNTS.get(unit, "seconds"), amount
        self._part = Fraction(0) if every is None else _part_of_epoch(every, calendar)
        # Between these steps, and within epochs, nothing is due, and the counts need not be looked at.
        self._steps = int(amount) if unit == "steps" else 1
        self._only_at_ends = unit == "epochs" and not self._part
        self._listed = () if every is None else every.steps
        self._of_epoch = -1, 0, Fraction(1)
        self._done = self._last = 0

    def due(self, progress: Progress, epoch_ended: bool) -> bool:
        """Return whether the interval ends with the last step.

        Args:
            progress: The counts after that step. If the epoch has just ended, `epoch` includes it.
            epoch_ended: Whether the step was the last of its epoch.
        """
        if not (epoch_ended or self._awaits_first) and (self._only_at_ends or progress.steps % self._steps):
            return False
        # Count from the last call: nobody calls after a skipped step.
        passed, before = self.passed(progress, epoch_ended), self._done
        is_new = passed > before and not (self.ends_epochs and progress.steps == self._last)
        self._done, self._last = passed, progress.steps
        self._awaits_first = self._awaits_first and not progress.steps
        return is_new and (self.begins is None or self.begins.reached(progress, epoch_ended))

    @property
    def at_start(self) -> bool:
        """Whether step 0 is listed."""
        return 0 in self._listed

    def passed(self, progress: Progress, epoch_ended: bool = False) -> int:
        """Return how many ends of the interval are at or before a point of a run; see `due`."""
        if self._listed:
            return bisect_right(self._listed, progress.steps) + (self.first_step and progress.steps > 0)
        if not self._part:
            passed = int(getattr(progress, self._counter) / self._amount)
            return passed + self.ends_epochs * progress.epoch + (self.first_step and progress.steps > 0)
        # Parts of 0.5 epochs of 5 steps end at 2.5 and 5: due at the first step at or after each.
        if self._of_epoch[0] != progress.epoch:
            self._of_epoch = progress.epoch, *self._calendar.parts_of(progress.epoch, self._part)
        _, ended, part = self._of_epoch
        # Savers call when `epoch_steps` is already 0, that of the next epoch.
        return ended + (0 if epoch_ended else progress.epoch_steps * part.denominator // part.numerator)

    def start(self, progress: Progress) -> None:
        """Begin at `progress`; intervals that ended before it are not due again."""
        self._done, self._last = self.passed(progress), progress.steps
        self._awaits_first = self.first_step and not progress.steps


def _part_of_epoch(every: Every, calendar: Calendar) -> Fraction:
    """Return the part of an epoch that an interval is; 0 for any other interval."""
    if every.unit != "epochs" or every.amount == int(every.amount):
        return Fraction(0)
    if every.amount > 1 or calendar.length is None:
        needed = "data of known length" if every.amount < 1 else "whole epochs"
        raise ConfigError(f"an interval of {every} needs {needed}; give a number of steps instead")
    return exact(every.amount) or Fraction(1, 1_000_000)
