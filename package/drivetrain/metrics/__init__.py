"""Metrics of a whole set of samples; those of batches are torchmetrics."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
