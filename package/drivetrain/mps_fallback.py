"""Having the CPU compute what Apple's Metal cannot; without torch, which asks once, when it is loaded."""

from __future__ import annotations

import os
import sys

from drivetrain.errors import ConfigError

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


def enable_mps_fallback() -> None:
    """Have operations that MPS lacks computed on the CPU, with the copies there and back.

    To be called before torch is imported: it reads the variable PYTORCH_ENABLE_MPS_FALLBACK when it is loaded
    (https://docs.pytorch.org/docs/stable/mps_environment_variables.html). Where the variable is set already
    nothing happens.

    Raises:
        ConfigError: torch was imported without the variable.
    """
    if os.environ.get(FALLBACK) == "1":
        return
    if "torch" in sys.modules:
        raise ConfigError(
            "enable_mps_fallback() comes too late: torch is imported, and looks for the fallback only then."
            f" Call it before anything that imports torch, or start the program with {FALLBACK}=1"
        )
    os.environ[FALLBACK] = "1"
