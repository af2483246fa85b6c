"""Where a run's scalars and configuration go: TensorBoard, CSV, JSON lines, or a logger of your own."""

from drivetrain.loggers.base import LOGGERS, Logger, LoggerSpec, build_loggers
from drivetrain.loggers.csv import CSVLogger
from drivetrain.loggers.jsonl import JSONLinesLogger
from drivetrain.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "LOGGERS",
    "CSVLogger",
    "JSONLinesLogger",
    "Logger",
    "LoggerSpec",
    "TensorBoardLogger",
    "build_loggers",
]
