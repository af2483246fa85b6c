"""The planned length of a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.core.intervals import PerEpoch
from drivetrain.core.progress import Progress


@dataclass(frozen=True)
class Totals:
    """The planned length of a fit, and how its updates are made; None where it is unknown beforehand.

    Attributes:
        updates: Updates in the whole run.
        epochs: Epochs in the whole run, the last of them begun.
        updates_per_epoch: Updates in an epoch, if all have as many.
        max_updates: The limit that was set, if one was.
        max_seconds: The limit of wall time, if one was set.
        max_epochs: The limit of epochs that was set, if one was; it may be a fraction.
        end: The epoch, and the micro-batches of it, after which that limit is reached.
        gradient_accumulation_steps: Micro-batches per update on each process, if a fit has begun; the most of
            them if their number changes.
        samples_per_update: Samples of a full update over all processes, at the start if they change.
        world_size: The number of processes, if a fit has begun.
        min_updates: The updates before which no callback stops the fit.
        min_epochs: The epochs before which no callback stops the fit.
        updates_in: Returns the updates of an epoch by its number, if epochs differ.
    """

    updates: int | None = None
    epochs: int | None = None
    updates_per_epoch: int | None = None
    max_updates: int | None = None
    max_seconds: float | None = None
    max_epochs: float | None = None
    end: tuple[int, int] | None = None
    gradient_accumulation_steps: int | None = None
    samples_per_update: int | None = None
    world_size: int | None = None
    min_updates: int = 0
    min_epochs: int = 0
    updates_in: Callable[[int], int] | None = None

    @property
    def per_epoch(self) -> PerEpoch | None:
        """The updates of an epoch for a `Trigger`: a number, a function of the epoch, or None."""
        return self.updates_per_epoch if self.updates_in is None else self.updates_in

    def is_early(self, progress: Progress) -> bool:
        """Return whether callbacks may not stop the fit yet."""
        return progress.updates < self.min_updates or progress.epoch < self.min_epochs

    def epochs_until(self, progress: Progress) -> int | None:
        """Return the end of the range of epochs that a fit reads from `progress` on; None if unknown."""
        per_epoch, until = self.updates_per_epoch, self.epochs
        if self.max_updates is None or not per_epoch:
            return until
        left = self.max_updates - progress.updates + progress.epoch_updates
        last = progress.epoch - (-left // per_epoch)
        return last if until is None else min(until, last)
