"""From arguments to a run, and the verbs."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
