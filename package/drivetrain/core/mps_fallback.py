"""Run operations that Apple's Metal lacks on the CPU. Imports no torch, which reads the setting on import."""

from __future__ import annotations

import os
import sys

from drivetrain.core.errors import ConfigError

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


def enable_mps_fallback() -> None:
    """Run operations that MPS lacks on the CPU; each copies its tensors there and back.

    Call this before torch is imported: torch reads the variable PYTORCH_ENABLE_MPS_FALLBACK when it loads
    (https://docs.pytorch.org/docs/stable/mps_environment_variables.html). If the variable is already set,
    nothing happens.

    Raises:
        ConfigError: torch was imported without the variable.
    """
    if os.environ.get(FALLBACK) == "1":
        return
    if "torch" in sys.modules:
        raise ConfigError(
            "enable_mps_fallback() was called too late: torch reads the setting when it is imported."
            f" Call it before anything that imports torch, or start the program with {FALLBACK}=1"
        )
    os.environ[FALLBACK] = "1"
