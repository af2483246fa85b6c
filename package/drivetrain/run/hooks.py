"""The names of the hooks, and a run's table of the hooks in use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.synonyms import foreign, help_with
from drivetrain.distributed.failure.named_locations import register_hooks

HOOKS = (
    "on_fit_start",
    "on_epoch_start",
    "on_step_start",
    "on_micro_batch_end",
    "on_before_optimizer_step",
    "on_step_end",
    "on_epoch_end",
    "on_evaluation_start",
    "on_evaluation_step_end",
    "on_evaluation_end",
    "on_log",
    "on_save",
    "on_checkpoint_saved",
    "on_checkpoint_loaded",
    "on_exception",
    "on_fit_end",
)
"""All hooks of a callback; `drivetrain.callbacks.Callback` draws where each is called."""

_ENDS = ("on_step_end", "on_epoch_end", "on_evaluation_end")
"""Hooks that end what another began: the last callback to begin it is the first to end it."""

_LAST = ("on_fit_end", "on_exception")
"""The same for a fit. Savers come last, so that their files have all changes of the other hooks."""

register_hooks(HOOKS)


def is_used(hook: object) -> bool:
    """Return whether a run calls a callback's attribute of a hook's name."""
    return hook is not None and not getattr(hook, "__unused_hook__", False)


class Hooked:
    """The base of `drivetrain.Callback`; this layer knows callbacks by it."""


class Hooks:
    """The callbacks' methods by hook, looked up once, so that an unused hook costs nothing."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for callback in callbacks:
            if (theirs := foreign(callback)) is not None:
                raise ConfigError(f"{theirs} Another library's callback cannot watch a run of drivetrain")
            for name in dir(callback):
                if name.startswith("on_") and name not in HOOKS and callable(getattr(callback, name)):
                    raise ConfigError(
                        f"{type(callback).__name__}.{name} is no hook. {help_with(name, HOOKS, 'hook')}"
                    )
            for name in HOOKS:
                _check_takes_the_run(getattr(callback, name, None), f"{type(callback).__name__}.{name}")
            if not isinstance(callback, Hooked):
                raise ConfigError(
                    f"{callback!r} is not a callback: its class must have the base drivetrain.Callback. The"
                    f" hooks are {', '.join(HOOKS)}. For a single function use"
                    " LambdaCallback(on_step_end=...)"
                )
        savers = [each for each in callbacks if each.after_saver or is_used(each.on_save)]
        others_first = [*(each for each in callbacks[::-1] if each not in savers), *savers]
        orders = dict.fromkeys(_ENDS, callbacks[::-1]) | dict.fromkeys(_LAST, others_first)
        for name in HOOKS:
            found = [getattr(callback, name) for callback in orders.get(name, callbacks)]
            found.sort(key=lambda hook: not getattr(hook, "__comes_first__", False))
            setattr(self, name, tuple(filter(is_used, found)))

    def __getattr__(self, name: str) -> tuple[Any, ...]:  # for type checkers: every hook is set above
        raise AttributeError(name)


def _check_takes_the_run(hook: Callable[..., Any] | None, name: str) -> None:
    if hook is None or not is_used(hook):
        return
    try:
        signature = inspect.signature(hook, follow_wrapped=False)
    except ValueError:  # as of some functions written in C
        return
    try:
        signature.bind(None)
    except TypeError:
        wrong = "cannot be called"
    else:
        wrong = "is a hook of Keras" if "logs" in signature.parameters else ""
    if wrong:
        raise ConfigError(
            f"{name}({', '.join(signature.parameters)}) {wrong}: a hook is given the run alone. Write it as"
            f" `def {name.partition('.')[2]}(self, run)`"
        )
