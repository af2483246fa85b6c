"""Callbacks of Lightning in a Trainer of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError
from drivetrain.run.run import Run
from drivetrain.task.task import TaskModule


class LightningCallbacks(Callback):
    """Users' and libraries' callbacks of Lightning: `from_lightning_arguments` makes one of them all.

    Their hooks are called where those of the module are, before them, each with the `self.trainer` of the
    module and with the module.

    Args:
        callbacks: The callbacks.
    """

    changes_data = True

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = tuple(callbacks)

    @contextmanager
    def modify_task(self, task: TaskModule) -> Iterator[None]:
        """Call their `setup` before the fit builds its optimizers, and their hooks from then on."""
        self._join(task)
        yield

    @contextmanager
    def wrap_run(self, run: Run) -> Iterator[None]:
        """Call their hooks in the run."""
        self._join(run.task)
        yield

    def _join(self, task: Any) -> None:
        hooks: Any = getattr(task, "hooks", None)
        if not callable(getattr(hooks, "join", None)):
            names = ", ".join(type(each).__name__ for each in self.callbacks)
            raise ConfigError(
                f"{names}: callbacks of Lightning are called for the task of as_task(module), not for a"
                f" {type(task).__name__}. Write a drivetrain.Callback, whose hooks are each given the run"
            )
        new = [each for each in self.callbacks if each not in hooks.callbacks]
        if new:
            hooks.join(new)
