"""DeepSpeed's complaints about its configuration, raised as our errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from drivetrain.core.errors import ConfigError, StrategyError, nearest
from drivetrain.strategies.deepspeed.library import library, quiet

_SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization.",
    "DeepSpeedBF16Config": "bf16.",
    "DeepSpeedFP16Config": "fp16.",
    "CompileConfig": "compile.",
    "HybridEngineConfig": "hybrid_engine.",
    "DeepSpeedMonitorConfig": "",
    "CommsLoggerConfig": "comms_logger.",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler.",
    "WeightQuantConfig": "weight_quantization.",
}
"""The section that each of DeepSpeed's own classes reads."""


def check_by_deepspeed(settings: Mapping[str, Any], device: str) -> None:
    """Check a configuration with DeepSpeed's own parser.

    Args:
        settings: DeepSpeed's configuration.
        device: The kind of device of the run.

    Raises:
        ConfigError: DeepSpeed refuses a name or a value; the message says which, and what is allowed.
    """
    library(device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        with quiet():
            DeepSpeedConfig(dict(settings))
    except ValidationError as error:
        raise ConfigError(f"DeepSpeed's configuration has {_described(error)}") from error
    # DeepSpeed's own error is a bare Exception.
    except Exception as error:
        raise ConfigError(f"DeepSpeed refuses its configuration: {_words(error)}") from error


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Run the block with DeepSpeed's failed assertions and bad combinations raised as `StrategyError`.

    Raises:
        StrategyError: DeepSpeed refused; has DeepSpeed's message.
    """
    try:
        yield
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise StrategyError(
            f"DeepSpeed refuses to start with this configuration and task: {_words(error)}"
        ) from error


def _words(error: Exception) -> str:
    return str(error) or f"{type(error).__name__} without a message; the traceback says where"


def _described(error: Any) -> str:
    first = error.errors()[0]
    path = [str(each) for each in first["loc"]]
    name = _SECTION_OF.get(error.title, f"{error.title}: ") + ".".join(path)
    if first["type"] != "extra_forbidden":
        return f"{name}={first['input']!r}: {first['msg']}"
    return f"{name!r}, which DeepSpeed does not know. {nearest(path[-1], _names(error.title, path[:-1]))}"


def _names(title: str, path: list[str]) -> list[str]:
    """Return the names that one of DeepSpeed's classes reads, or the class of a section in it."""
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
