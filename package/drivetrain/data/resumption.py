"""Where the data of a fit goes on from a checkpoint: at its position, at its start, or after a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from drivetrain.core.calendar import Calendar
from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.data.known_tokens import tokens_per_sample
from drivetrain.data.sources import Source


class Resumption(NamedTuple):
    """Where the data of a fit goes on from a checkpoint.

    Attributes:
        new_data: Whether other data begins at its start.
        skip: The data to leave out after the position; None for none.
        once: Whether a checkpoint of a fit that was asked for the same goes on at its position.
    """

    new_data: bool = False
    skip: Every | None = None
    once: bool = False

    @property
    def asked(self) -> str:
        """The arguments that were given, as text; empty if none was."""
        given = ["new_data=True"] if self.new_data else []
        return ", ".join(given + ([] if self.skip is None else [f"skip={str(self.skip)!r}"]))

    def applies_to(self, saved: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint's position is changed."""
        return bool(self.asked) and not (self.once and saved.get("data_asked") == self.asked)


def leave_out(every: Every, source: Source, calendar: Calendar, progress: Progress) -> int:
    """Move a run's position past the data of an interval.

    Returns:
        The micro-batches that are to be read and dropped: data of unknown length has no position to move to.

    Raises:
        ConfigError: The interval has a unit that cannot be counted without reading the data.
        DataError: The data is empty.
    """
    _check_unit(every, source, calendar)
    is_fine = every.unit in ("samples", "tokens")  # finer than a step
    if is_fine:
        each = 1 if every.unit == "samples" else _tokens(source, calendar)
        amount, group, size = -(-int(every.amount) // (each or 1)), 1, 1
    else:
        group = calendar.batches.first
        amount, size = calendar.step_of(every) * group, 1 if source.is_split else source.shard.size
        size *= calendar.batch_size.first if calendar.counts_samples else 1
    if not source.exact:
        return amount
    length = calendar.length or 0
    while True:
        left = source.count(progress.position) if not is_fine else length - progress.position
        whole = -(-(left or 0) // group) * group  # the last step of an epoch may be short
        if amount <= whole:
            break
        if not whole and not progress.position:
            raise DataError(f"the {source.name} data is empty: nothing of it can be skipped")
        amount -= whole
        progress.epoch += 1
        progress.position = progress.epoch_steps = progress.epoch_batches = 0
    end = progress.position + amount * size
    progress.position = min(end, length) if calendar.counts_samples else end
    return 0


def _tokens(source: Source, calendar: Calendar) -> int | None:
    """Return the tokens of a sample, or of a stream's round of batches; None if they are unknown."""
    loader = source.loader
    if source.exact:
        return tokens_per_sample(source.dataset) if calendar.counts_samples else None
    each = tokens_per_sample(getattr(loader, "dataset", None))
    return (each or 0) * source.shard.size * (getattr(loader, "batch_size", None) or 0) or None


def _check_unit(every: Every, source: Source, calendar: Calendar) -> None:
    is_fixed, is_planned = not calendar.varies, calendar.is_planned
    units = {
        "steps": is_fixed,
        "epochs": is_fixed and source.exact,
        "samples": source.exact and calendar.counts_samples and is_planned,
        "tokens": (is_planned or not source.exact) and _tokens(source, calendar),
    }
    if not units.get(every.unit):
        counted = " or ".join(unit for unit, is_counted in units.items() if is_counted)
        raise ConfigError(
            f"skip={str(every)!r} cannot be counted before the {source.name} data is read. Give "
            + (counted or "one number of gradient_accumulation_steps, and steps")
        )
