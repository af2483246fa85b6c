"""Intervals as a user writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

from drivetrain.core.errors import ConfigError, nearest

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
COUNTS = {"steps": "steps", "epochs": "epoch", "samples": "samples", "tokens": "tokens"}
"""The counts of `Progress` by unit."""
_DIGITS = r"\d+(?:_\d+)*"
_INTERVAL = re.compile(
    rf"((?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:e[+-]?\d+)?)?\s*([kmbt](?=\s+[a-z]))?\s*([a-z]+)?",
    re.ASCII | re.IGNORECASE,
)
"""A number as Python writes it, underscores included, and a unit; either may be missing, not both."""
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LISTED, LOG_SPACED = "listed steps", "log-spaced steps"
_SYNONYMS = {"updates": "steps", "step": "steps", "update": "steps"}


@dataclass(frozen=True)
class Every:
    """An interval: ``Every("500 steps")``, ``"1 epoch"``, ``"10 minutes"``, ``"10M tokens"`` or a number of
    steps. K, M, B and T after a number are thousand, million, billion and trillion. A text without a unit
    that is below 1, such as ``"0.2"``, is that part of the run. ``[0, 1, 2, 4, 8]`` lists the steps; 0 is
    before the first one. See also `log_spaced`.

    Attributes:
        amount: The number of units; only times and epochs may be fractions ("0.25 epochs").
        unit: "steps", "epochs", "samples", "tokens", "seconds", "minutes", "hours"; "runs" for a part
            of the run; "listed steps" or "log-spaced steps".
        steps: The listed steps.
    """

    amount: float
    unit: str = "steps"
    steps: tuple[int, ...] = ()

    def __init__(self, spec: Interval, unit: str | None = None) -> None:
        object.__setattr__(self, "steps", _listed(spec))
        amount, name = _parse(spec) if unit is None else (_number(spec), _unit(unit, spec))
        if not (amount > 0 and math.isfinite(amount)):
            raise ConfigError(f"an interval must be positive, not {spec!r}. None leaves out what it is for")
        if amount != int(amount) and name in ("steps", "samples", "tokens"):
            part = f"{amount:g}" if amount < 1 else "0.5"
            raise ConfigError(
                f"an interval of {spec!r} is not a whole number of {name}. A part of an epoch is"
                f" '{part} epochs', and a part of the run the text '{part}'"
            )
        object.__setattr__(self, "amount", amount)
        object.__setattr__(self, "unit", name)

    @property
    def seconds(self) -> float | None:
        """The interval in seconds, or None if its unit is not a time."""
        return self.amount * _SECONDS[self.unit] if self.unit in _SECONDS else None

    def __str__(self) -> str:
        if self.steps:
            return str([*self.steps])
        number = str(int(self.amount)) if self.amount == int(self.amount) else repr(self.amount)
        if self.unit == "runs":
            return number
        return f"{number} {self.unit[:-1] if self.amount == 1 else self.unit}"


Interval: TypeAlias = str | int | float | timedelta | Every | Sequence[int]
"""An interval: "500 steps", "1 epoch", "10 minutes", a number of steps, or a list of steps."""


def log_spaced(points: int) -> Every:
    """Return an interval that is due at steps spaced evenly on a log scale, from step 1 to the run's last.

    The steps are rounded, and are all different; a run of fewer steps has all of its steps.

    Args:
        points: The number of steps, at least 2.

    Raises:
        ConfigError: Fewer points; or, at the start of a fit, a run whose number of steps is not known.
    """
    if not isinstance(points, int) or isinstance(points, bool) or points < 2:
        raise ConfigError(f"log_spaced takes a number of steps, at least 2, not {points!r}")
    return Every(f"{points} {LOG_SPACED}")


def log_spaced_steps(points: int, last: int) -> list[int]:
    """Return the steps of `log_spaced` in a run of `last` steps."""
    found = [1]
    for number in range(1, points):
        found.append(max(found[-1] + 1, round(last ** (number / (points - 1)))))
    return [each for each in found if each <= last]


def _unit(name: str, spec: object) -> str:
    unit = name.lower()
    unit = _SYNONYMS.get(unit, unit)
    units = [*COUNTS, *_SECONDS]
    for each in units:
        if unit in (each, each[:-1]):
            return each
    hint = "Intervals count optimizer steps, not batches. " if unit.startswith(("batch", "iter")) else ""
    hint = "K, M, B and T come before a unit, as in '10M tokens'. " if unit in _MULTIPLES else hint
    raise ConfigError(f"unknown unit {name!r} in the interval {spec!r}. {hint}{nearest(unit, units)}")


def _listed(spec: object) -> tuple[int, ...]:
    """Return the steps of an interval that lists them; for any other it is empty."""
    if isinstance(spec, Every):
        return spec.steps
    if isinstance(spec, str) and re.fullmatch(r"\[[\d_, ]+\]", spec.strip()):
        spec = [int(each) for each in spec.strip("[] ").split(",") if each.strip()]
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        return ()
    steps = tuple(spec)
    whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in steps)
    if not (steps and whole and list(steps) == sorted(set(steps))):
        raise ConfigError(f"a list of steps has increasing whole numbers, such as [0, 1, 2, 4], not {spec!r}")
    return steps


def _number(spec: object) -> float:
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return float(spec)
    raise ConfigError(f"Every(amount, unit) takes a number and a unit, not the amount {spec!r}")


def _parse(spec: object) -> tuple[float, str]:
    if isinstance(spec, Every):
        return spec.amount, spec.unit
    if steps := _listed(spec):
        return len(steps), _LISTED
    if isinstance(spec, timedelta):
        return spec.total_seconds(), "seconds"
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return float(spec), "steps"
    found = _parse_text(spec.strip()) if isinstance(spec, str) else None
    if found is not None:
        return found
    raise ConfigError(
        f"{spec!r} is not an interval. Write a number of steps, or a text such as "
        "'500 steps', '1 epoch', '10 minutes' or '10M tokens'"
        + ("; None leaves out what it is for" if spec is False else "")
    )


def _parse_text(spec: str) -> tuple[float, str] | None:
    points, _, unit = spec.partition(" ")
    if unit == LOG_SPACED and points.isdecimal():
        return float(points), LOG_SPACED
    match = _INTERVAL.fullmatch(spec)
    if not match or not (match[1] or match[3]):
        return None
    amount = Decimal(match[1] or "1") * _MULTIPLES[(match[2] or "").lower()]
    return float(amount), "runs" if amount < 1 and not match[3] else _unit(match[3] or "steps", spec)


def steps_or_epochs(argument: str, value: Interval) -> Every:
    """Return an interval of steps or whole epochs."""
    every = Every(value)
    if every.unit not in ("steps", "epochs") or every.amount != int(every.amount):
        raise ConfigError(f"{argument} takes steps or whole epochs, such as '2 epochs', not {value!r}")
    return every


def no_time(argument: str, value: Interval) -> Every:
    """Return an interval that a resumed run, or another machine, ends at the same step."""
    every = Every(value)
    if every.seconds is not None:
        raise ConfigError(
            f"{argument} cannot be a time, {value!r}: a resumed run, or another machine, would be at another"
            " step then. Give steps, epochs, samples or tokens"
        )
    return every


def exact(amount: float) -> Fraction:
    """Return a number of epochs as the exact fraction that was meant: 0.333... is 1/3."""
    return Fraction(amount).limit_denominator(1_000_000)
