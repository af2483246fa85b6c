"""Intervals: how a user writes them, and when they are due."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TypeAlias

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.progress import Progress

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_COUNTS = {"steps": "steps", "epochs": "epoch", "samples": "samples", "tokens": "tokens"}
_DIGITS = r"\d+(?:_\d+)*"
_INTERVAL = re.compile(
    rf"((?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:e[+-]?\d+)?)?\s*([a-z]+)?", re.ASCII | re.IGNORECASE
)
"""A number as Python writes it, underscores included, and a unit; either may be missing, not both."""
PerEpoch = int | Callable[[int], int]
"""The steps of an epoch: a number, or a function of the epoch."""

_SYNONYMS = {"updates": "steps", "step": "steps", "update": "steps"}


@dataclass(frozen=True)
class Every:
    """An interval: ``Every("500 steps")``, ``"1 epoch"``, ``"10 minutes"``, ``"1_000_000 tokens"`` or a
    number of steps.

    Attributes:
        amount: The number of units; only times and epochs may be fractions ("0.25 epochs").
        unit: "steps", "epochs", "samples", "tokens", "seconds", "minutes" or "hours".
    """

    amount: float
    unit: str = "steps"

    def __init__(self, spec: str | int | float | timedelta | Every, unit: str | None = None) -> None:
        amount, name = _parse(spec) if unit is None else (_number(spec), _unit(unit, spec))
        if not (amount > 0 and math.isfinite(amount)):
            raise ConfigError(f"an interval must be positive, not {spec!r}. None leaves out what it is for")
        if amount != int(amount) and name in ("steps", "samples", "tokens"):
            part = f"{amount:g}" if amount < 1 else "0.5"
            raise ConfigError(
                f"an interval of {spec!r} is not a whole number of {name}. A part of an epoch is"
                f" '{part} epochs'"
            )
        object.__setattr__(self, "amount", amount)
        object.__setattr__(self, "unit", name)

    @property
    def seconds(self) -> float | None:
        """The interval in seconds, or None if its unit is not a time."""
        return self.amount * _SECONDS[self.unit] if self.unit in _SECONDS else None

    def __str__(self) -> str:
        number = str(int(self.amount)) if self.amount == int(self.amount) else repr(self.amount)
        return f"{number} {self.unit[:-1] if self.amount == 1 else self.unit}"


Interval: TypeAlias = str | int | float | timedelta | Every
"""An interval: "500 steps", "1 epoch", "10 minutes", or a number of steps."""


def _unit(name: str, spec: object) -> str:
    unit = name.lower()
    unit = _SYNONYMS.get(unit, unit)
    units = [*_COUNTS, *_SECONDS]
    for each in units:
        if unit in (each, each[:-1]):
            return each
    hint = "Intervals count optimizer steps, not batches. " if unit.startswith(("batch", "iter")) else ""
    raise ConfigError(f"unknown unit {name!r} in the interval {spec!r}. {hint}{nearest(unit, units)}")


def _number(spec: object) -> float:
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return float(spec)
    raise ConfigError(f"Every(amount, unit) takes a number and a unit, not the amount {spec!r}")


def _parse(spec: object) -> tuple[float, str]:
    if isinstance(spec, Every):
        return spec.amount, spec.unit
    if isinstance(spec, timedelta):
        return spec.total_seconds(), "seconds"
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return float(spec), "steps"
    if isinstance(spec, str):
        match = _INTERVAL.fullmatch(spec.strip())
        if match and (match[1] or match[2]):
            return float(match[1] or "1"), _unit(match[2] or "steps", spec)
    raise ConfigError(
        f"{spec!r} is not an interval. Write a number of steps, or a text such as "
        "'500 steps', '1 epoch', '10 minutes' or '1_000_000 tokens'"
        + ("; None leaves out what it is for" if spec is False else "")
    )


def steps_or_epochs(argument: str, value: str | int | float | timedelta | Every) -> Every:
    """Return an interval of steps or whole epochs."""
    every = Every(value)
    if every.unit not in ("steps", "epochs") or every.amount != int(every.amount):
        raise ConfigError(f"{argument} takes steps or whole epochs, such as '2 epochs', not {value!r}")
    return every


def exact(amount: float) -> Fraction:
    """Return a number of epochs as the exact fraction that was meant: 0.333... is 1/3."""
    return Fraction(amount).limit_denominator(1_000_000)


def part_of_epoch(every: Every, steps_per_epoch: int) -> Fraction:
    """Return the number of steps in a fraction of an epoch, at least one."""
    # Exact: rounding would put 0.3 epochs of 10 steps at the fourth.
    return max(Fraction(1), exact(every.amount) * steps_per_epoch)


class Trigger:
    """When an `Every` is due. The times follow from the progress alone, so a restart moves none.

    Args:
        every: The interval; None is never due.
        steps_per_epoch: Needed for fractions of an epoch: the number, or a function of the epoch that
            returns it; None if the data's length is not known.

    Attributes:
        by_time: Whether `due` depends on the run's seconds.
        ends_epochs: Whether an interval of steps is due at the end of every epoch too.
    """

    def __init__(self, every: Every | None, steps_per_epoch: PerEpoch | None = None) -> None:
        self.every = every
        self.by_time = every is not None and every.seconds is not None
        self.ends_epochs = False
        self._by_epoch: Callable[[int], int] | None = None
        self._steps = 0
        self._within_epoch: tuple[int, int] | None = None
        self._per_epoch = 0
        self._position = 0
        self._epochs = 0
        self._counter = ""
        self._amount = 0.0
        self._done = 0
        self._last = 0
        if every is None:
            return
        if every.unit == "steps":
            self._steps = int(every.amount)
        elif every.unit == "epochs":
            self._set_epochs(every, steps_per_epoch)
        else:
            self._counter = _COUNTS.get(every.unit, "seconds")
            self._amount = every.seconds or every.amount

    def _set_epochs(self, every: Every, steps_per_epoch: PerEpoch | None) -> None:
        if every.amount == int(every.amount):
            self._epochs = int(every.amount)
        elif every.amount < 1 and steps_per_epoch is not None:
            if callable(steps_per_epoch):
                self._by_epoch, steps_per_epoch = steps_per_epoch, steps_per_epoch(0)
            self._set_part(every, steps_per_epoch)
        else:
            raise ConfigError(
                f"an interval of {every} needs"
                f" {'data of known length' if every.amount < 1 else 'whole epochs'}; give a number of steps"
                " instead"
            )

    def _set_part(self, every: Every, steps_per_epoch: int) -> None:
        self._within_epoch = part_of_epoch(every, steps_per_epoch).as_integer_ratio()
        self._per_epoch = steps_per_epoch

    def due(self, progress: Progress, epoch_ended: bool) -> bool:
        """Return whether the interval ends with the last step.

        Args:
            progress: The counts after that step. If the epoch has just ended, `epoch` includes it.
            epoch_ended: Whether the step was the last of its epoch.
        """
        if self._steps:
            due = progress.steps % self._steps == 0 or (epoch_ended and self.ends_epochs)
            return due and self._is_new(progress.steps)
        if self._epochs:
            return epoch_ended and progress.epoch % self._epochs == 0
        if self._within_epoch is not None:
            if self._by_epoch is not None:
                per_epoch = self._by_epoch(progress.epoch - epoch_ended)
                if per_epoch != self._per_epoch and self.every is not None:
                    self._set_part(self.every, per_epoch)
            # Count from the last call: nobody calls after a skipped step, and savers call when
            # `epoch_steps` is already 0, that of the next epoch.
            before, done = self._position, self._per_epoch if epoch_ended else progress.epoch_steps
            self._position = 0 if epoch_ended else done
            return self._passes_part(before, done)
        if self._counter:
            passed = int(getattr(progress, self._counter) / self._amount)
            due, self._done = passed > self._done, max(passed, self._done)
            return due
        return False

    def is_due_by(self, done: int, progress: Progress) -> bool:
        """Return whether a part of the epoch has ended since it was last due, after so many steps.

        Args:
            done: The steps of the epoch, the skipped ones included.
        """
        return self._within_epoch is not None and self._passes_part(self._position, done)

    def _passes_part(self, before: int, done: int) -> bool:
        # Parts of 0.5 epochs of 5 steps end at 2.5 and 5: due at the first step at or after each.
        assert self._within_epoch is not None
        above, below = self._within_epoch
        return done * below // above > before * below // above

    def _is_new(self, step: int) -> bool:
        # A skipped step leaves the count unchanged; an interval that was due there is not due twice.
        new, self._last = step != self._last, step
        return new

    def start(self, progress: Progress) -> None:
        """Begin at `progress`; intervals that ended before it are not due again."""
        self._last = progress.steps
        self._position = progress.epoch_steps
        if self._counter:
            self._done = int(getattr(progress, self._counter) / self._amount)


class Point:
    """A point of a run, given as the interval from its start. It follows from the progress alone."""

    def __init__(self, begins: Every, steps_per_epoch: PerEpoch | None = None) -> None:
        self.begins = begins
        self._whole, part = divmod(exact(begins.amount), 1)
        if part and begins.unit == "epochs" and steps_per_epoch is None:
            raise ConfigError(
                f"{begins} from the start need data of known length; give whole epochs or a number of steps"
            )
        if callable(steps_per_epoch):
            steps_per_epoch = steps_per_epoch(int(self._whole))
        self._part = part * (steps_per_epoch or 0)

    def reached(self, progress: Progress, epoch_ended: bool = False) -> bool:
        """Return whether the run is at the point, or past it; see `Trigger.due`."""
        if self.begins.unit == "epochs":
            done = 0 if epoch_ended else progress.epoch_steps
            return (progress.epoch, done) >= (self._whole, self._part)
        counter = _COUNTS.get(self.begins.unit, "seconds")
        return bool(getattr(progress, counter) >= (self.begins.seconds or self.begins.amount))


class DelayedTrigger(Trigger):
    """A trigger that is not due before a point of the run.

    Args:
        begins: The point, as the interval from the run's start.
    """

    def __init__(self, every: Every | None, begins: Every, steps_per_epoch: PerEpoch | None = None) -> None:
        super().__init__(every, steps_per_epoch)
        self._begins = Point(begins, steps_per_epoch)
        self.by_time = self.by_time or begins.seconds is not None

    def due(self, progress: Progress, epoch_ended: bool) -> bool:
        """Return whether the interval ends with the last step, at or after the point."""
        return super().due(progress, epoch_ended) and self._begins.reached(progress, epoch_ended)

    def is_due_by(self, done: int, progress: Progress) -> bool:
        """Return whether a part of an epoch has ended since it was last due, at or after the point."""
        return super().is_due_by(done, progress) and self._begins.reached(progress)


class FirstStepTrigger(Trigger):
    """A trigger that is also due after the first step of a run."""

    def __init__(self, every: Every | None, steps_per_epoch: PerEpoch | None = None) -> None:
        super().__init__(every, steps_per_epoch)
        self._awaited = True

    def due(self, progress: Progress, epoch_ended: bool) -> bool:
        """Return whether the interval ends with the last step, or that was the first."""
        due, first = super().due(progress, epoch_ended), self._awaited and progress.steps == 1
        self._awaited = self._awaited and not first
        return due or first

    def start(self, progress: Progress) -> None:
        super().start(progress)
        self._awaited = progress.steps == 0
