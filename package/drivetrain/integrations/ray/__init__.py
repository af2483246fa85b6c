"""Ray: trials of Ray Tune, and fits inside Ray Train, which report their values and checkpoints."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
