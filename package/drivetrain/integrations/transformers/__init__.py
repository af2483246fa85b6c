"""Hugging Face: models of transformers as tasks, and transformers' arguments."""

from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.lazy import exports
from drivetrain.core.registry import is_installed

if not is_installed("transformers"):
    raise MissingDependencyError("transformers", "transformers", "drivetrain.integrations.transformers")

__getattr__, __dir__, __all__ = exports(__name__)
