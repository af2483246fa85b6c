"""Search of hyper-parameters over Optuna: `drivetrain.search`, and the command `drivetrain search`."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
