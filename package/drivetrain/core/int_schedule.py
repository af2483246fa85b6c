"""A whole number that changes at points of a run, such as 8 at first and 4 from the fourth epoch on."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, overload

from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.validation import count

__all__ = ["IntSchedule", "ramp"]

_UNITS = ("steps", "epochs", "samples", "tokens")
_START = re.compile(r"0\s*[a-z]*", re.IGNORECASE)
_EXAMPLE = "{0: 8, '4 epochs': 4}"


class IntSchedule(dict[Any, int]):
    """A whole number that changes at points of a run; points are counted from its start.

    Args:
        spec: A number, or a mapping of points to numbers. A point is 0 for the start, or an interval such as
            "4 epochs". All have one unit: steps, whole epochs, or samples or tokens of all processes.

    Attributes:
        unit: "steps", "epochs", "samples" or "tokens".
    """

    def __init__(self, name: str, spec: object) -> None:
        if not isinstance(spec, Mapping):
            spec = {0: count(name, spec, at_least=1)}
        if not spec:
            raise ConfigError(f"{name} is an empty mapping. Give a number, or numbers by points: {_EXAMPLE}")
        self.unit = "steps"
        found: dict[int, int] = {}
        first: object = None
        for point, value in spec.items():
            amount = 0
            if not _is_start(point):
                amount, unit = _point(name, point)
                if first is not None and unit != self.unit:
                    raise ConfigError(
                        f"{name} has points in different units, {first!r} and {point!r}. Give all of them in"
                        " steps, in epochs, in samples, or in tokens"
                    )
                first, self.unit = point, unit
            if amount in found:
                raise ConfigError(f"{name} has two numbers for the point {point!r}. Give one")
            found[amount] = count(f"{name} from {point!r} on", value, at_least=1)
        if 0 not in found:
            raise ConfigError(f"{name} has no number for the start. Add it for the point 0: {_EXAMPLE}")
        self._starts = sorted(found)
        self._numbers = [found[each] for each in self._starts]
        points = [str(Every(each, self.unit)) if each else 0 for each in self._starts]
        super().__init__(zip(points, self._numbers, strict=True))

    @property
    def first(self) -> int:
        return self._numbers[0]

    def at(self, done: int) -> int:
        """Return the number that holds after so many units of the run."""
        return self._numbers[bisect_right(self._starts, done) - 1]

    def next_start(self, done: int) -> int | None:
        """Return the next point after so many units of the run; None if there is none."""
        index = bisect_right(self._starts, done)
        return self._starts[index] if index < len(self._starts) else None

    def by_samples(self, tokens: Callable[[int], int]) -> IntSchedule:
        """Return the schedule with its points, which are in tokens, in samples.

        Args:
            tokens: Returns the tokens of a sample while a number holds.
        """
        points: dict[Any, int] = {0: self.first}
        samples = before = 0
        for start, number in zip(self._starts, self._numbers, strict=True):
            if start:
                samples += -(-(start - before) // tokens(self.at(before)))
                points[f"{samples} samples"], before = number, start
        return IntSchedule("points in tokens", points)

    def __str__(self) -> str:
        later = (f", {number} from {point} on" for point, number in self.items() if point)
        return f"{self.first}{''.join(later)}"

    def __hash__(self) -> int:  # type: ignore[override]  # of a frozen Trainer's arguments
        return hash((self.unit, *self._starts, *self._numbers))


def number_or_schedule(name: str, spec: object) -> IntSchedule | int:
    """Return a number as it is, and numbers by points as a `IntSchedule`, unless there is only one."""
    schedule = IntSchedule(name, spec)
    return schedule if len(schedule) > 1 else schedule.first


def most(number: Mapping[Any, int] | int) -> int:
    """Return the largest number of a schedule, or the number."""
    return max(number.values()) if isinstance(number, Mapping) else number


@overload
def at_start(number: Mapping[Any, int] | int) -> int: ...
@overload
def at_start(number: Mapping[Any, int] | int | None) -> int | None: ...
def at_start(number: Mapping[Any, int] | int | None) -> int | None:
    """Return the first number of a schedule, or the number."""
    return number[0] if isinstance(number, Mapping) else number


def ramp(first: int, last: int, *, over: str | int, by: int) -> dict[Any, int]:
    """Return numbers that grow or shrink in equal steps over a part of a run.

    They are a mapping for `Trainer(batch_size=...)`, `Trainer(gradient_accumulation_steps=...)` and
    `SequenceLength`. The points are those of Megatron's `--rampup-batch-size` and of the schedule
    "fixed_linear" of DeepSpeed's curriculum: the i-th of n steps is made after i / n of `over`.

    Args:
        first: The number at the start.
        last: The number at the end of `over` and after it.
        over: The length of the ramp: "5000 steps", "2_000_000 samples", "10B tokens", "10 epochs", or a
            number of steps.
        by: The size of a step; it divides `last - first`.

    Raises:
        ConfigError: An argument that is not allowed; says what is.
    """
    first, last = count("first", first, at_least=1), count("last", last, at_least=1)
    by = count("by", by, at_least=1)
    length, unit = _point("over", over)
    steps, rest = divmod(abs(last - first), by)
    if rest or not steps:
        raise ConfigError(
            f"ramp({first}, {last}, by={by}): {last} is not reached from {first} in steps of {by}. Give a"
            f" `by` that divides {abs(last - first)}"
            if rest
            else f"ramp({first}, {last}): the two numbers are equal. Give the number itself"
        )
    step = by if last > first else -by
    made: dict[Any, int] = {0: first}
    for number in range(1, steps + 1):
        made[str(Every(-(-number * length // steps), unit))] = first + number * step
    return made


def _is_start(point: object) -> bool:
    if isinstance(point, str):
        return _START.fullmatch(point.strip()) is not None
    return isinstance(point, int) and not isinstance(point, bool) and point == 0


def _point(name: str, point: Any) -> tuple[int, str]:
    """Return a point as an amount and its unit."""
    every = Every(point)
    if every.unit not in _UNITS or every.amount != int(every.amount):
        raise ConfigError(
            f"{name} changes at points in steps, whole epochs, samples or tokens, such as '4 epochs', not at"
            f" {point!r}"
        )
    return int(every.amount), every.unit
