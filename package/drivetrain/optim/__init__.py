"""Optimizers and schedules by configuration."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
