"""Objects that watch or steer a run; `Callback` draws where each hook is called."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
