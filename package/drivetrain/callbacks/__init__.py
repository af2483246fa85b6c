"""Objects that watch or steer a run; `Callback` draws where each hook is called."""

from typing import TYPE_CHECKING

from drivetrain.core.lazy import exports

if TYPE_CHECKING:
    from drivetrain.callbacks.base import HOOKS, Callback
    from drivetrain.callbacks.compile_time import CompileTime
    from drivetrain.callbacks.early_stopping import EarlyStopping
    from drivetrain.callbacks.empty_cache import EmptyCache
    from drivetrain.callbacks.freeze import Freeze
    from drivetrain.callbacks.lambda_callback import LambdaCallback
    from drivetrain.callbacks.learning_rate import LearningRateMonitor
    from drivetrain.callbacks.loss_spike import LossSpike
    from drivetrain.callbacks.memory_report import MemoryReport
    from drivetrain.callbacks.nonfinite_detector import NonFiniteDetector
    from drivetrain.callbacks.profile import Profile
    from drivetrain.callbacks.progress_bar import ProgressBar
    from drivetrain.callbacks.sequence_length import SequenceLength
    from drivetrain.callbacks.statistics.activation_stats import ActivationStats
    from drivetrain.callbacks.statistics.device_stats import DeviceStats
    from drivetrain.callbacks.statistics.gradient_norms import GradientNorms
    from drivetrain.callbacks.statistics.throughput import Throughput
    from drivetrain.callbacks.statistics.weight_histograms import WeightHistograms
    from drivetrain.callbacks.summary import ModelSummary, summarize
    from drivetrain.callbacks.weight_average import WeightAverage
    from drivetrain.callbacks.xla_report import XLAReport
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.callbacks.base": ("HOOKS", "Callback"),
            "drivetrain.callbacks.compile_time": ("CompileTime",),
            "drivetrain.callbacks.early_stopping": ("EarlyStopping",),
            "drivetrain.callbacks.empty_cache": ("EmptyCache",),
            "drivetrain.callbacks.statistics.activation_stats": ("ActivationStats",),
            "drivetrain.callbacks.statistics.device_stats": ("DeviceStats",),
            "drivetrain.callbacks.statistics.gradient_norms": ("GradientNorms",),
            "drivetrain.callbacks.freeze": ("Freeze",),
            "drivetrain.callbacks.lambda_callback": ("LambdaCallback",),
            "drivetrain.callbacks.learning_rate": ("LearningRateMonitor",),
            "drivetrain.callbacks.loss_spike": ("LossSpike",),
            "drivetrain.callbacks.memory_report": ("MemoryReport",),
            "drivetrain.callbacks.nonfinite_detector": ("NonFiniteDetector",),
            "drivetrain.callbacks.profile": ("Profile",),
            "drivetrain.callbacks.progress_bar": ("ProgressBar",),
            "drivetrain.callbacks.sequence_length": ("SequenceLength",),
            "drivetrain.callbacks.summary": ("ModelSummary", "summarize"),
            "drivetrain.callbacks.statistics.throughput": ("Throughput",),
            "drivetrain.callbacks.weight_average": ("WeightAverage",),
            "drivetrain.callbacks.statistics.weight_histograms": ("WeightHistograms",),
            "drivetrain.callbacks.xla_report": ("XLAReport",),
        },
    )

__all__ = [
    "HOOKS",
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
    "summarize",
]
