"""The user's side of training: the task, its step's output, its hyper-parameters, its optimizers."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
