"""Processes: start them, connect them, watch them, and end them together."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
