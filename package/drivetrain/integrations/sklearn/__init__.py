"""scikit-learn: tasks as estimators, for its cross-validation, grid searches and pipelines."""

from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.lazy import exports
from drivetrain.core.registry import is_installed

if not is_installed("sklearn"):
    raise MissingDependencyError("scikit-learn", "sklearn", "drivetrain.integrations.sklearn")

__getattr__, __dir__, __all__ = exports(__name__)
