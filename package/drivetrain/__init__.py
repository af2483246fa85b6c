"""drivetrain: a PyTorch training library that separates the task from the engine.

The public names are loaded when they are first used (PEP 562), so that importing the package costs next to
nothing and brings in no optional package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drivetrain.version import __version__

if TYPE_CHECKING:
    from drivetrain.callbacks import (
        Callback,
        EarlyStopping,
        LambdaCallback,
        LearningRateMonitor,
        ModelSummary,
        ProgressBar,
        Throughput,
    )
    from drivetrain.checkpoint import CheckpointConfig
    from drivetrain.engine import Engine
    from drivetrain.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DrivetrainError,
        MissingDependencyError,
        NonFiniteError,
        RankFailure,
        StrategyError,
    )
    from drivetrain.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
    from drivetrain.optim import OptimizerConfig, ParameterGroup
    from drivetrain.plan import Plan
    from drivetrain.precision import Precision
    from drivetrain.progress import Progress
    from drivetrain.run import Run
    from drivetrain.strategies.ddp import DDPConfig
    from drivetrain.strategies.fsdp_config import FSDPConfig
    from drivetrain.task import TaskModule
    from drivetrain.trainer import FitResult, Trainer
    from drivetrain.types import Every, StepOutput
    from drivetrain.window import StepResult

_HOMES = {
    "drivetrain.callbacks": (
        "Callback",
        "EarlyStopping",
        "LambdaCallback",
        "LearningRateMonitor",
        "ModelSummary",
        "ProgressBar",
        "Throughput",
    ),
    "drivetrain.checkpoint": ("CheckpointConfig",),
    "drivetrain.engine": ("Engine",),
    "drivetrain.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DrivetrainError",
        "MissingDependencyError",
        "NonFiniteError",
        "RankFailure",
        "StrategyError",
    ),
    "drivetrain.loggers": ("CSVLogger", "JSONLinesLogger", "TensorBoardLogger"),
    "drivetrain.optim": ("OptimizerConfig", "ParameterGroup"),
    "drivetrain.plan": ("Plan",),
    "drivetrain.precision": ("Precision",),
    "drivetrain.progress": ("Progress",),
    "drivetrain.run": ("Run",),
    "drivetrain.strategies.ddp": ("DDPConfig",),
    "drivetrain.strategies.fsdp_config": ("FSDPConfig",),
    "drivetrain.task": ("TaskModule",),
    "drivetrain.trainer": ("FitResult", "Trainer"),
    "drivetrain.types": ("Every", "StepOutput"),
    "drivetrain.window": ("StepResult",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "DDPConfig",
    "DataError",
    "DrivetrainError",
    "EarlyStopping",
    "Engine",
    "Every",
    "FSDPConfig",
    "FitResult",
    "JSONLinesLogger",
    "LambdaCallback",
    "LearningRateMonitor",
    "MissingDependencyError",
    "ModelSummary",
    "NonFiniteError",
    "OptimizerConfig",
    "ParameterGroup",
    "Plan",
    "Precision",
    "Progress",
    "ProgressBar",
    "RankFailure",
    "Run",
    "StepOutput",
    "StepResult",
    "StrategyError",
    "TaskModule",
    "TensorBoardLogger",
    "Throughput",
    "Trainer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from drivetrain.errors import nearest

        raise AttributeError(f"drivetrain has no {name!r}. {nearest(name, _MODULE_OF)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
