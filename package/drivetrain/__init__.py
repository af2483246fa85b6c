"""drivetrain: a PyTorch training library that separates the task from the engine.

The public names are loaded when they are first used (PEP 562), so that importing the package costs next to
nothing and brings in no optional package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import exports
from drivetrain.version import __version__

if TYPE_CHECKING:
    from drivetrain.callbacks import (
        Callback,
        CompileTime,
        EarlyStopping,
        LambdaCallback,
        LearningRateMonitor,
        LossSpike,
        MemoryReport,
        ModelSummary,
        NonFiniteDetector,
        ProgressBar,
        Throughput,
    )
    from drivetrain.checkpoint import CheckpointConfig
    from drivetrain.compiling import CompileConfig
    from drivetrain.data.split import already_split
    from drivetrain.distributed.processes import one_at_a_time, rank, world_size
    from drivetrain.engine import Engine
    from drivetrain.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DivergenceError,
        DrivetrainError,
        MissingDependencyError,
        NonFiniteError,
        Preempted,
        RankFailure,
        StrategyError,
    )
    from drivetrain.float8 import Float8
    from drivetrain.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
    from drivetrain.memory import MemoryConfig
    from drivetrain.memory_use import MemoryUse
    from drivetrain.mps_fallback import enable_mps_fallback
    from drivetrain.optim import OptimizerConfig, ParameterGroup
    from drivetrain.plan import Plan
    from drivetrain.precision import Precision
    from drivetrain.preemption import PreemptionConfig
    from drivetrain.progress import Progress
    from drivetrain.run import Run
    from drivetrain.strategies.accelerate_config import AccelerateConfig
    from drivetrain.strategies.ddp import DDPConfig
    from drivetrain.strategies.deepspeed_config import DeepSpeedConfig
    from drivetrain.strategies.fsdp_config import FSDPConfig
    from drivetrain.strategies.xla import XLAConfig
    from drivetrain.strategies.xla_fsdp import XLAFSDPConfig
    from drivetrain.strategies.xla_fsdp_v2 import XLAFSDPv2Config
    from drivetrain.task import TaskModule
    from drivetrain.trainer import FitResult, Trainer
    from drivetrain.types import Every, StepOutput
    from drivetrain.window import StepResult

_HOMES = {
    "drivetrain.callbacks": (
        "Callback",
        "CompileTime",
        "EarlyStopping",
        "LambdaCallback",
        "LearningRateMonitor",
        "LossSpike",
        "MemoryReport",
        "ModelSummary",
        "NonFiniteDetector",
        "ProgressBar",
        "Throughput",
    ),
    "drivetrain.checkpoint": ("CheckpointConfig",),
    "drivetrain.compiling": ("CompileConfig",),
    "drivetrain.data.split": ("already_split",),
    "drivetrain.distributed.processes": ("one_at_a_time", "rank", "world_size"),
    "drivetrain.engine": ("Engine",),
    "drivetrain.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DivergenceError",
        "DrivetrainError",
        "MissingDependencyError",
        "NonFiniteError",
        "Preempted",
        "RankFailure",
        "StrategyError",
    ),
    "drivetrain.float8": ("Float8",),
    "drivetrain.loggers": ("CSVLogger", "JSONLinesLogger", "TensorBoardLogger"),
    "drivetrain.memory": ("MemoryConfig",),
    "drivetrain.memory_use": ("MemoryUse",),
    "drivetrain.mps_fallback": ("enable_mps_fallback",),
    "drivetrain.optim": ("OptimizerConfig", "ParameterGroup"),
    "drivetrain.plan": ("Plan",),
    "drivetrain.precision": ("Precision",),
    "drivetrain.preemption": ("PreemptionConfig",),
    "drivetrain.progress": ("Progress",),
    "drivetrain.run": ("Run",),
    "drivetrain.strategies.accelerate_config": ("AccelerateConfig",),
    "drivetrain.strategies.ddp": ("DDPConfig",),
    "drivetrain.strategies.deepspeed_config": ("DeepSpeedConfig",),
    "drivetrain.strategies.fsdp_config": ("FSDPConfig",),
    "drivetrain.strategies.xla": ("XLAConfig",),
    "drivetrain.strategies.xla_fsdp": ("XLAFSDPConfig",),
    "drivetrain.strategies.xla_fsdp_v2": ("XLAFSDPv2Config",),
    "drivetrain.task": ("TaskModule",),
    "drivetrain.trainer": ("FitResult", "Trainer"),
    "drivetrain.types": ("Every", "StepOutput"),
    "drivetrain.window": ("StepResult",),
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _HOMES)

__all__ = [
    "AccelerateConfig",
    "CSVLogger",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "CompileConfig",
    "CompileTime",
    "ConfigError",
    "DDPConfig",
    "DataError",
    "DeepSpeedConfig",
    "DivergenceError",
    "DrivetrainError",
    "EarlyStopping",
    "Engine",
    "Every",
    "FSDPConfig",
    "FitResult",
    "Float8",
    "JSONLinesLogger",
    "LambdaCallback",
    "LearningRateMonitor",
    "LossSpike",
    "MemoryConfig",
    "MemoryReport",
    "MemoryUse",
    "MissingDependencyError",
    "ModelSummary",
    "NonFiniteDetector",
    "NonFiniteError",
    "OptimizerConfig",
    "ParameterGroup",
    "Plan",
    "Precision",
    "Preempted",
    "PreemptionConfig",
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
    "XLAConfig",
    "XLAFSDPConfig",
    "XLAFSDPv2Config",
    "__version__",
    "already_split",
    "enable_mps_fallback",
    "one_at_a_time",
    "rank",
    "world_size",
]
