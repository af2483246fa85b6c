"""The planned length of a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.core.intervals import PerEpoch
from drivetrain.core.progress import Progress


@dataclass(frozen=True)
class Totals:
    """The planned length of a fit, and how its steps are made; None where it is unknown beforehand.

    Attributes:
        steps: Steps in the whole run.
        epochs: Epochs in the whole run, the last of them begun.
        steps_per_epoch: Steps in an epoch, if all have as many.
        max_steps: The limit that was set, if one was.
        max_seconds: The limit of wall time, if one was set.
        max_epochs: The limit of epochs that was set, if one was; it may be a fraction.
        end: The epoch, and the micro-batches of it, after which that limit is reached.
        gradient_accumulation_steps: Micro-batches per step on each process, if a fit has begun; the most of
            them if their number changes.
        samples_per_step: Samples of a full step over all processes, at the start if they change.
        world_size: The number of processes, if a fit has begun.
        min_steps: The steps before which no callback stops the fit.
        min_epochs: The epochs before which no callback stops the fit.
        steps_in: Returns the steps of an epoch by its number, if epochs differ.
    """

    steps: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    max_seconds: float | None = None
    max_epochs: float | None = None
    end: tuple[int, int] | None = None
    gradient_accumulation_steps: int | None = None
    samples_per_step: int | None = None
    world_size: int | None = None
    min_steps: int = 0
    min_epochs: int = 0
    steps_in: Callable[[int], int] | None = None

    @property
    def per_epoch(self) -> PerEpoch | None:
        """The steps of an epoch for a `Trigger`: a number, a function of the epoch, or None."""
        return self.steps_per_epoch if self.steps_in is None else self.steps_in

    def limit_reached(self, progress: Progress) -> str | None:
        """Return which of the limits, the same on all ranks, is reached; None if the fit may go on."""
        if self.max_steps is not None and progress.steps >= self.max_steps:
            return f"max_steps={self.max_steps} reached"
        if self.max_seconds is not None and progress.seconds >= self.max_seconds:
            return f"max_time={self.max_seconds:g} seconds reached"
        if self.end is not None and (progress.epoch, progress.epoch_batches) >= self.end:
            return f"max_epochs={self.max_epochs} reached"
        return None

    def is_early(self, progress: Progress) -> bool:
        """Return whether callbacks may not stop the fit yet."""
        return progress.steps < self.min_steps or progress.epoch < self.min_epochs

    def epochs_until(self, progress: Progress) -> int | None:
        """Return the end of the range of epochs that a fit reads from `progress` on; None if unknown."""
        per_epoch, until = self.steps_per_epoch, self.epochs
        if self.max_steps is None or not per_epoch:
            return until
        left = self.max_steps - progress.steps + progress.epoch_steps
        last = progress.epoch - (-left // per_epoch)
        return last if until is None else min(until, last)
