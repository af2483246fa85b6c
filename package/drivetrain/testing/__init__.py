"""What tests of users and of third-party strategies and storage need: real processes, planted faults."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.testing.distributed import run_distributed
    from drivetrain.testing.strategies import check_strategy
    from drivetrain.testing.strategy_resume import check_resume

__all__ = ["check_resume", "check_strategy", "run_distributed"]

_HOMES = {
    "check_resume": "drivetrain.testing.strategy_resume",
    "check_strategy": "drivetrain.testing.strategies",
    "run_distributed": "drivetrain.testing.distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
