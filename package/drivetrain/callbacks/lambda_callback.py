"""A callback from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import HOOKS, Callback
from drivetrain.core.errors import ConfigError
from drivetrain.core.synonyms import help_with

if TYPE_CHECKING:
    from drivetrain.run.run import Run


class LambdaCallback(Callback):
    """Calls a function at each named hook: ``LambdaCallback(on_step_end=lambda run: ...)``.

    Args:
        **hooks: Functions by hook name; each is called with the run. Other hooks cost nothing.

    Raises:
        ConfigError: No hook has that name, or its value is not callable.
    """

    def __init__(self, **hooks: Callable[[Run], object]) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise ConfigError(f"there is no hook {name!r}. {help_with(name, HOOKS, 'hook')}")
            if not callable(function):
                raise ConfigError(f"{name} must be a function that is given the run, not {function!r}")
            # On the instance, where a run looks first: the other hooks stay those of the base class, marked
            # unused.
            setattr(self, name, function)
