"""The Hugging Face Hub: upload models and checkpoints while a run trains, and resume from there."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
