"""Losses that torch has not, for tasks of any kind."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
