"""Who watches the fits of this process, without a word in the program that makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

Step = TypeVar("Step")


class Observer(Protocol):
    """Is told of each verb of a Trainer before its run is built, and may have it run otherwise."""

    def begins(self, trainer: Trainer, task: Any, data: tuple[Any, ...]) -> Mapping[str, Any]:
        """A fit begins.

        Args:
            trainer: Its settings.
            task: What is trained.
            data: The training and the validation data, as they were given.

        Returns:
            Arguments of the Trainer in place of those that it has; and "resume", if that is to be another.
        """

    def loops(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """The updates of a fit whose loop has a body of the program's; returns them, to be seen going by."""

    def evaluates(self, trainer: Trainer) -> Mapping[str, Any]:
        """A validation, test or prediction begins; returns arguments as `begins` does."""


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Within it, and in this thread, each Trainer asks the observer before it runs something."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observed_fit(
    trainer: Trainer, task: Any, data: tuple[Any, ...], resume: str | None
) -> tuple[Trainer, str | None]:
    """The Trainer of a fit, and what it resumes from: as they are, unless somebody watches."""
    observer = _observer.get()
    if observer is None:
        return trainer, resume
    changes = dict(observer.begins(trainer, task, data))
    resume = changes.pop("resume", resume)
    return dataclasses.replace(trainer, **changes), resume


def observed_loop(steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
    """The updates that a program's own loop is given: as they are, unless somebody watches."""
    observer = _observer.get()
    return steps if observer is None else observer.loops(steps)


def observed_evaluation(trainer: Trainer) -> Trainer:
    """The Trainer of a validation, test or prediction: as it is, unless somebody watches."""
    observer = _observer.get()
    return trainer if observer is None else dataclasses.replace(trainer, **observer.evaluates(trainer))
