"""What DeepSpeed itself finds wrong with its configuration, in our own errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from drivetrain.errors import ConfigError, StrategyError, nearest
from drivetrain.strategies.deepspeed_library import library, quiet
from drivetrain.strategies.deepspeed_names import SECTION_OF


def check_by_deepspeed(settings: Mapping[str, Any], device: str) -> None:
    """Have DeepSpeed read what it would be given.

    Args:
        settings: Its configuration.
        device: The kind of device that it will run on.

    Raises:
        ConfigError: It refuses a name or a value; says which, and what is allowed.
    """
    library(device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        with quiet():
            DeepSpeedConfig(dict(settings))
    except ValidationError as error:
        raise ConfigError(f"DeepSpeed's configuration has {_described(error)}") from error
    # Its own error is a bare Exception.
    except Exception as error:
        raise ConfigError(f"DeepSpeed refuses its configuration: {_words(error)}") from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Within it what DeepSpeed asserts, or finds wrong with settings together, is a `StrategyError`.

    Raises:
        StrategyError: With DeepSpeed's own words.
    """
    try:
        yield
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise StrategyError(
            f"DeepSpeed refuses to begin with this configuration and task: {_words(error)}"
        ) from error


def _words(error: Exception) -> str:
    return str(error) or f"{type(error).__name__}, without words; its traceback says where"


def _described(error: Any) -> str:
    first = error.errors()[0]
    path = [str(each) for each in first["loc"]]
    name = SECTION_OF.get(error.title, f"{error.title}: ") + ".".join(path)
    if first["type"] != "extra_forbidden":
        return f"{name}={first['input']!r}: {first['msg']}"
    return f"{name!r}, which DeepSpeed does not know. {nearest(path[-1], _names(error.title, path[:-1]))}"


def _names(title: str, path: list[str]) -> list[str]:
    """The names that one of DeepSpeed's classes reads, or the class of a section within it."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    model: Any = next((each for each in _kinds(DeepSpeedConfigModel) if each.__name__ == title), None)
    for part in path:
        field = model.model_fields.get(part) if model is not None else None
        annotation = None if field is None else field.annotation
        found = [each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields")]
        model = found[0] if found else None
    fields = {} if model is None else model.model_fields
    return [field.alias or name for name, field in fields.items()]


def _kinds(root: Any) -> Iterator[Any]:
    for each in root.__subclasses__():
        yield each
        yield from _kinds(each)
