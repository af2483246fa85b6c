"""Observers of the fits in this process. The program that makes the fits need not know of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from drivetrain.run.settings import RunSettings

Step = TypeVar("Step")
Settings = TypeVar("Settings", bound=RunSettings)


class Observer(Protocol):
    """An object that is called before a Trainer's verb builds its run, and that may change its arguments."""

    def begins(self, trainer: RunSettings) -> Mapping[str, Any]:
        """Observe the start of a fit.

        Returns:
            Arguments that replace the Trainer's, and "resume" to replace that.
        """

    def loops(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """Observe the steps of a fit whose loop body is the program's; return an iterator over them."""

    def evaluates(self, trainer: RunSettings) -> Mapping[str, Any]:
        """Observe the start of a validation, test or prediction; return arguments as `begins` does."""


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Run the block with an observer: each Trainer of this thread asks it before it runs something."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observed(trainer: Settings, is_fit: bool, resume: str | None = None) -> tuple[Settings, str | None]:
    """Return the Trainer of a verb and its `resume`, as the observer changes them."""
    observer = _observer.get()
    if observer is None:
        return trainer, resume
    changes = dict(observer.begins(trainer) if is_fit else observer.evaluates(trainer))
    resume = changes.pop("resume", resume)
    return dataclasses.replace(trainer, **changes), resume


def observed_loop(steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
    """Return the steps for a program's own loop, as the observer changes them."""
    observer = _observer.get()
    return steps if observer is None else observer.loops(steps)
