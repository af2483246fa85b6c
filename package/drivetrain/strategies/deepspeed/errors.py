"""DeepSpeed's complaints about its configuration, raised as our errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.deepspeed.library import library, quiet


def check_by_deepspeed(settings: Mapping[str, Any], device: str) -> None:
    """Check a configuration with DeepSpeed's own parser.

    Args:
        settings: DeepSpeed's configuration.
        device: The kind of device of the run.

    Raises:
        ConfigError: DeepSpeed refuses a name or a value; the message is DeepSpeed's.
    """
    library(device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        with quiet():
            DeepSpeedConfig(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (error.title, *first["loc"])))
        raise ConfigError(f"DeepSpeed refuses {name}={first['input']!r}: {first['msg']}") from error
    # DeepSpeed's own error is a bare Exception.
    except Exception as error:
        raise ConfigError(f"DeepSpeed refuses its configuration: {error!r}") from error
