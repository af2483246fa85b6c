"""The small vocabulary that every other module shares."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from drivetrain.errors import ConfigError, nearest
from drivetrain.progress import Progress

Batch: TypeAlias = Any
"""One micro-batch as the data gives it: a tensor, a mapping, a sequence, or an object with a `to(device)`."""

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
"""What can stand in a JSON file."""


class StepOutput(NamedTuple):
    """What a step gives back when a bare loss is not enough; a tuple, in which wrappers find its tensors.

    Attributes:
        loss: The scalar that is optimised, or a mapping whose "loss" is; the rest is logged.
        outputs: The model's outputs; with them the declared metrics are updated.
        metrics: Further scalars to log, averaged with the loss's weight.
    """

    loss: Tensor | Mapping[str, Any]
    outputs: Any = None
    metrics: Mapping[str, Any] | None = None


@runtime_checkable
class Stateful(Protocol):
    """An object whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, arrays, numbers, strings, and dicts, lists and tuples of them."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take over what `state_dict` gave."""
        ...


@runtime_checkable
class Logger(Protocol):
    """Where scalars and the configuration go; see `drivetrain.loggers`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record scalars at an update."""
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the run's configuration once, at its start."""
        ...

    def close(self) -> None:
        """Write what is held back and release files; may be called more than once."""
        ...


_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_COUNTS = {"steps": "updates", "epochs": "epoch", "samples": "samples", "tokens": "tokens"}
_DIGITS = r"\d+(?:_\d+)*"
_INTERVAL = re.compile(
    rf"((?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:e[+-]?\d+)?)?\s*([a-z]+)?", re.ASCII | re.IGNORECASE
)
"""A number as Python writes it, underscores included, and a unit; either may be missing, not both."""
_SYNONYMS = {"updates": "steps", "step": "steps", "update": "steps"}


@dataclass(frozen=True)
class Every:
    """An interval: ``Every("500 steps")``, ``"1 epoch"``, ``"10 minutes"``, ``"1_000_000 tokens"`` or a
    number of steps.

    Attributes:
        amount: How many units; whole but for times and epochs ("0.25 epochs" is a quarter of one).
        unit: "steps", "epochs", "samples", "tokens", "seconds", "minutes" or "hours".
    """

    amount: float
    unit: str = "steps"

    def __init__(self, spec: str | int | float | timedelta | Every, unit: str | None = None) -> None:
        amount, name = _parse(spec) if unit is None else (_number(spec), _unit(unit, spec))
        if not (amount > 0 and math.isfinite(amount)):
            raise ConfigError(f"an interval must be positive, not {spec!r}")
        if amount != int(amount) and name in ("steps", "samples", "tokens"):
            raise ConfigError(f"an interval of {spec!r} is not a whole number of {name}")
        object.__setattr__(self, "amount", amount)
        object.__setattr__(self, "unit", name)

    @property
    def seconds(self) -> float | None:
        """The interval in seconds when its unit is a time, else None."""
        return self.amount * _SECONDS[self.unit] if self.unit in _SECONDS else None

    def __str__(self) -> str:
        number = str(int(self.amount)) if self.amount == int(self.amount) else repr(self.amount)
        return f"{number} {self.unit[:-1] if self.amount == 1 else self.unit}"


def _unit(name: str, spec: object) -> str:
    unit = name.lower()
    unit = _SYNONYMS.get(unit, unit)
    units = [*_COUNTS, *_SECONDS]
    for each in units:
        if unit in (each, each[:-1]):
            return each
    raise ConfigError(f"unknown unit {name!r} in the interval {spec!r}. {nearest(unit, units)}")


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
    )


def part_of_epoch(every: Every, updates_per_epoch: int) -> Fraction:
    """Return the updates in a fraction of an epoch, at least one."""
    # Exact, or rounding would put 0.3 epochs of 10 updates at the fourth. The limit makes a third of
    # 0.333..., which is a little less.
    return max(Fraction(1), Fraction(every.amount).limit_denominator(1_000_000) * updates_per_epoch)


class Trigger:
    """Tells when an `Every` is due; a function of the progress, so that a restart moves nothing.

    Args:
        every: The interval, or None for never.
        updates_per_epoch: Needed for fractions of an epoch; None when the data has no known length.

    Raises:
        ConfigError: A fraction of an epoch whose length is not known.
    """

    def __init__(self, every: Every | None, updates_per_epoch: int | None = None) -> None:
        self.every = every
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
            self._set_epochs(every, updates_per_epoch)
        else:
            self._counter = _COUNTS.get(every.unit, "seconds")
            self._amount = every.seconds or every.amount

    def _set_epochs(self, every: Every, updates_per_epoch: int | None) -> None:
        if every.amount == int(every.amount):
            self._epochs = int(every.amount)
        elif every.amount < 1 and updates_per_epoch is not None:
            self._within_epoch = part_of_epoch(every, updates_per_epoch).as_integer_ratio()
            self._per_epoch = updates_per_epoch
        else:
            raise ConfigError(
                f"an interval of {every} needs"
                f" {'data of known length' if every.amount < 1 else 'whole epochs'}; give a number of steps"
                " instead"
            )

    def due(self, progress: Progress, epoch_ended: bool) -> bool:
        """Whether the interval ends with the update just made.

        Args:
            progress: The counts after that update, `epoch` counting the epoch that may just have ended.
            epoch_ended: Whether the update was the last of its epoch.
        """
        if self._steps:
            return progress.updates % self._steps == 0 and self._is_new(progress.updates)
        if self._epochs:
            return epoch_ended and progress.epoch % self._epochs == 0
        if self._within_epoch is not None:
            # From where it was last asked: a skipped update does not ask, and savers ask when the count is
            # that of the next epoch already, 0.
            before, done = self._position, self._per_epoch if epoch_ended else progress.epoch_updates
            self._position = 0 if epoch_ended else done
            return self._passes_part(before, done)
        if self._counter:
            passed = int(getattr(progress, self._counter) / self._amount)
            due, self._done = passed > self._done, max(passed, self._done)
            return due
        return False

    def _passes_part(self, before: int, done: int) -> bool:
        # The parts of 5 updates by 0.5 epochs end at 2.5 and 5: due at the first update at or after each.
        assert self._within_epoch is not None
        above, below = self._within_epoch
        return done * below // above > before * below // above

    def _is_new(self, update: int) -> bool:
        # A skipped update leaves the count where it was, and what was due there is not due twice.
        new, self._last = update != self._last, update
        return new

    def start(self, progress: Progress) -> None:
        """Begin at `progress`: what was due before it is not due again."""
        self._last = progress.updates
        self._position = progress.epoch_updates
        if self._counter:
            self._done = int(getattr(progress, self._counter) / self._amount)
