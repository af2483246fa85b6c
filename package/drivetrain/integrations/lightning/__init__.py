"""Lightning: modules as tasks, data modules as data, checkpoints' weights, and arguments."""

from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.lazy import exports
from drivetrain.core.registry import is_installed

if not is_installed("lightning") and not is_installed("pytorch_lightning"):
    raise MissingDependencyError("lightning", "lightning", "drivetrain.integrations.lightning")

__getattr__, __dir__, __all__ = exports(__name__)
