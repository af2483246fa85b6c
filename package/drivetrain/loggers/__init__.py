"""Loggers for a run's scalars, histograms and configuration: TensorBoard, CSV and JSON lines."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
