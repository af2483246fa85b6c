"""Loggers, and what they take beside numbers: images, figures, histograms, texts, tables, sound and video."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
