"""Loggers for a run's scalars, histograms and configuration: TensorBoard, CSV and JSON lines."""

from typing import TYPE_CHECKING

from drivetrain.core.lazy import exports

if TYPE_CHECKING:
    from drivetrain.core.types import Histogram, HistogramLogger
    from drivetrain.loggers.base import LOGGERS, Logger, LoggerSpec, build_loggers
    from drivetrain.loggers.csv import CSVLogger
    from drivetrain.loggers.jsonl import JSONLinesLogger
    from drivetrain.loggers.tensorboard import TensorBoardLogger
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.core.types": ("Histogram", "HistogramLogger"),
            "drivetrain.loggers.base": ("LOGGERS", "Logger", "LoggerSpec", "build_loggers"),
            "drivetrain.loggers.csv": ("CSVLogger",),
            "drivetrain.loggers.jsonl": ("JSONLinesLogger",),
            "drivetrain.loggers.tensorboard": ("TensorBoardLogger",),
        },
    )

__all__ = [
    "LOGGERS",
    "CSVLogger",
    "Histogram",
    "HistogramLogger",
    "JSONLinesLogger",
    "Logger",
    "LoggerSpec",
    "TensorBoardLogger",
    "build_loggers",
]
