"""Loggers for experiment trackers. Each needs its tracker's own package and the extra of its name."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
