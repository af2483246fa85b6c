"""drivetrain: a PyTorch training library that separates the task from the engine.

The public names are loaded when they are first used (PEP 562), so that importing the package costs next to
nothing and brings in no optional package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.core.lazy import exports
from drivetrain.core.version import __version__

if TYPE_CHECKING:
    from drivetrain.callbacks import (
        ActivationStats,
        Callback,
        CompileTime,
        DeviceStats,
        EarlyStopping,
        EmptyCache,
        Freeze,
        GradientNorms,
        LambdaCallback,
        LearningRateMonitor,
        LossSpike,
        MemoryReport,
        ModelSummary,
        NonFiniteDetector,
        Profile,
        ProgressBar,
        SequenceLength,
        Throughput,
        WeightAverage,
        WeightHistograms,
        XLAReport,
    )
    from drivetrain.checkpoint import CheckpointConfig
    from drivetrain.core.errors import (
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
    from drivetrain.core.intervals import Every
    from drivetrain.core.mps_fallback import enable_mps_fallback
    from drivetrain.core.progress import Progress
    from drivetrain.core.stages import ramp
    from drivetrain.core.totals import Totals
    from drivetrain.core.types import StepOutput
    from drivetrain.data.split_source import already_split
    from drivetrain.distributed.processes import local_rank, one_at_a_time, rank, world_size
    from drivetrain.engine.engine import Engine
    from drivetrain.engine.memory import MemoryConfig
    from drivetrain.engine.memory_profile import MemoryUse
    from drivetrain.engine.metrics.over_all import OverAll
    from drivetrain.engine.weighting import StepResult
    from drivetrain.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
    from drivetrain.run.preemption import PreemptionConfig
    from drivetrain.run.run import Run
    from drivetrain.strategies.accelerate.config import AccelerateConfig
    from drivetrain.strategies.ddp import DDPConfig
    from drivetrain.strategies.deepspeed.config import DeepSpeedConfig
    from drivetrain.strategies.fsdp.config import FSDPConfig
    from drivetrain.strategies.precision.base import Precision
    from drivetrain.strategies.precision.float8 import Float8
    from drivetrain.strategies.transforms.compile import CompileConfig
    from drivetrain.strategies.xla.fsdp_v1 import XLAFSDPConfig
    from drivetrain.strategies.xla.fsdp_v2 import XLAFSDPv2Config
    from drivetrain.strategies.xla.single import XLAConfig
    from drivetrain.task.optim.config import OptimizerConfig
    from drivetrain.task.optim.groups import ParameterGroup
    from drivetrain.task.optim.torch_schedule import TorchSchedule
    from drivetrain.task.task import TaskModule
    from drivetrain.trainer.plan.plan import Plan
    from drivetrain.trainer.trainer import FitResult, PredictResult, Trainer

_HOMES = {
    "drivetrain.callbacks": (
        "ActivationStats",
        "Callback",
        "CompileTime",
        "DeviceStats",
        "EarlyStopping",
        "EmptyCache",
        "Freeze",
        "GradientNorms",
        "LambdaCallback",
        "LearningRateMonitor",
        "LossSpike",
        "MemoryReport",
        "ModelSummary",
        "NonFiniteDetector",
        "Profile",
        "ProgressBar",
        "SequenceLength",
        "Throughput",
        "WeightAverage",
        "WeightHistograms",
        "XLAReport",
    ),
    "drivetrain.checkpoint": ("CheckpointConfig",),
    "drivetrain.strategies.transforms.compile": ("CompileConfig",),
    "drivetrain.data.split_source": ("already_split",),
    "drivetrain.distributed.processes": ("local_rank", "one_at_a_time", "rank", "world_size"),
    "drivetrain.engine.engine": ("Engine",),
    "drivetrain.core.errors": (
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
    "drivetrain.strategies.precision.float8": ("Float8",),
    "drivetrain.loggers": ("CSVLogger", "JSONLinesLogger", "TensorBoardLogger"),
    "drivetrain.engine.memory": ("MemoryConfig",),
    "drivetrain.engine.memory_profile": ("MemoryUse",),
    "drivetrain.engine.metrics.over_all": ("OverAll",),
    "drivetrain.core.mps_fallback": ("enable_mps_fallback",),
    "drivetrain.task.optim.config": ("OptimizerConfig",),
    "drivetrain.task.optim.groups": ("ParameterGroup",),
    "drivetrain.task.optim.torch_schedule": ("TorchSchedule",),
    "drivetrain.trainer.plan.plan": ("Plan",),
    "drivetrain.strategies.precision.base": ("Precision",),
    "drivetrain.run.preemption": ("PreemptionConfig",),
    "drivetrain.core.progress": ("Progress",),
    "drivetrain.run.run": ("Run",),
    "drivetrain.strategies.accelerate.config": ("AccelerateConfig",),
    "drivetrain.strategies.ddp": ("DDPConfig",),
    "drivetrain.strategies.deepspeed.config": ("DeepSpeedConfig",),
    "drivetrain.strategies.fsdp.config": ("FSDPConfig",),
    "drivetrain.strategies.xla.single": ("XLAConfig",),
    "drivetrain.strategies.xla.fsdp_v1": ("XLAFSDPConfig",),
    "drivetrain.strategies.xla.fsdp_v2": ("XLAFSDPv2Config",),
    "drivetrain.task.task": ("TaskModule",),
    "drivetrain.trainer.trainer": ("FitResult", "PredictResult", "Trainer"),
    "drivetrain.core.intervals": ("Every",),
    "drivetrain.core.stages": ("ramp",),
    "drivetrain.core.totals": ("Totals",),
    "drivetrain.core.types": ("StepOutput",),
    "drivetrain.engine.weighting": ("StepResult",),
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _HOMES)

__all__ = [
    "AccelerateConfig",
    "ActivationStats",
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
    "DeviceStats",
    "DivergenceError",
    "DrivetrainError",
    "EarlyStopping",
    "EmptyCache",
    "Engine",
    "Every",
    "FSDPConfig",
    "FitResult",
    "Float8",
    "Freeze",
    "GradientNorms",
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
    "OverAll",
    "ParameterGroup",
    "Plan",
    "Precision",
    "PredictResult",
    "Preempted",
    "PreemptionConfig",
    "Profile",
    "Progress",
    "ProgressBar",
    "RankFailure",
    "Run",
    "SequenceLength",
    "StepOutput",
    "StepResult",
    "StrategyError",
    "TaskModule",
    "TensorBoardLogger",
    "Throughput",
    "TorchSchedule",
    "Totals",
    "Trainer",
    "WeightAverage",
    "WeightHistograms",
    "XLAConfig",
    "XLAFSDPConfig",
    "XLAFSDPv2Config",
    "XLAReport",
    "__version__",
    "already_split",
    "enable_mps_fallback",
    "local_rank",
    "one_at_a_time",
    "ramp",
    "rank",
    "world_size",
]
