"""The errors that drivetrain raises, and the exit codes of its programs."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
