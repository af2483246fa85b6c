"""Strategies: where a step runs. Each has a file or folder, and a name."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
