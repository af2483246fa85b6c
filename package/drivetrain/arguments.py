"""What a Trainer's arguments stand for: texts and numbers as what they name, and back for a log."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.errors import ConfigError
from drivetrain.hooks import Hooks
from drivetrain.precision import Precision
from drivetrain.strategies import Strategy
from drivetrain.types import Every

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def check_run_dir(spec: object) -> None:
    """See that it is a local path, or None.

    Raises:
        ConfigError: It is an address, or no path at all.
    """
    if not isinstance(spec, (str, os.PathLike, type(None))):
        raise ConfigError(f"run_dir must be a path, or None for a new one, not {spec!r}")
    if "://" in str(spec):
        raise ConfigError(
            f"run_dir={spec!r} is an address, and logs are written to a local directory. Keep run_dir local,"
            " and send the checkpoints there: checkpoint=CheckpointConfig(directory=...)"
        )


def checked_callbacks(spec: Any) -> tuple[Any, ...]:
    """The callbacks, once it is seen that they are some.

    Raises:
        ConfigError: No sequence, a class in place of an object, or a method that is no hook.
    """
    single = not isinstance(spec, Iterable) or isinstance(spec, (str, Mapping))
    if single or any(isinstance(each, type) for each in spec):
        raise ConfigError(f"callbacks must be a sequence of callback objects, not {spec!r}")
    callbacks = tuple(spec)
    Hooks(callbacks)
    return callbacks


def check_callbacks(trainer: Trainer, strategy: Strategy) -> None:
    """Let callbacks that do not fit every Trainer say so, in a method `check_trainer(trainer, strategy)`.

    Raises:
        ConfigError: One does not fit; says why. A `StrategyError` if it is the strategy that it does not fit.
    """
    for callback in trainer.callbacks:
        check = getattr(callback, "check_trainer", None)
        if check is not None:
            check(trainer, strategy)


def checkpoint_policy(spec: object) -> object:
    """The policy itself.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(spec, (bool, CheckpointConfig)) or spec == "async":
        return spec
    raise ConfigError(f"checkpoint must be True, False, 'async' or a CheckpointConfig, not {spec!r}")


def plain(value: Any) -> Any:
    """A value as JSON has it; objects by the names of their classes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, Precision):
        return value.name
    if isinstance(value, (Every, os.PathLike)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"{type(value).__module__}.{type(value).__qualname__}"
