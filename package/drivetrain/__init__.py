"""drivetrain: a PyTorch training library that separates the task from the engine.

The public names are loaded when they are first used (PEP 562), so that importing the package costs next to
nothing and brings in no optional package.
"""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
