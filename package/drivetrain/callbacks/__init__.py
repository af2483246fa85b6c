"""What watches a run or steers it; `Callback` draws where each hook is called."""

from drivetrain.callbacks.base import HOOKS, Callback
from drivetrain.callbacks.compile_time import CompileTime
from drivetrain.callbacks.early_stopping import EarlyStopping
from drivetrain.callbacks.lambda_callback import LambdaCallback
from drivetrain.callbacks.learning_rate import LearningRateMonitor
from drivetrain.callbacks.memory_report import MemoryReport
from drivetrain.callbacks.progress_bar import ProgressBar
from drivetrain.callbacks.summary import ModelSummary, summarize
from drivetrain.callbacks.throughput import Throughput

__all__ = [
    "HOOKS",
    "Callback",
    "CompileTime",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "MemoryReport",
    "ModelSummary",
    "ProgressBar",
    "Throughput",
    "summarize",
]
