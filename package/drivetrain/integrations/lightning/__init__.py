"""Lightning: data modules as data, its checkpoints' weights, and its Trainer's arguments."""

from typing import TYPE_CHECKING

from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.lazy import exports
from drivetrain.core.registry import is_installed

if not is_installed("lightning") and not is_installed("pytorch_lightning"):
    raise MissingDependencyError("lightning", "lightning", "drivetrain.integrations.lightning")

if TYPE_CHECKING:
    from drivetrain.integrations.lightning.arguments import MappedTrainer, from_lightning_arguments
    from drivetrain.integrations.lightning.checkpoint import LoadedCheckpoint, load_checkpoint
    from drivetrain.integrations.lightning.data import as_data
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.integrations.lightning.arguments": ("MappedTrainer", "from_lightning_arguments"),
            "drivetrain.integrations.lightning.checkpoint": ("LoadedCheckpoint", "load_checkpoint"),
            "drivetrain.integrations.lightning.data": ("as_data",),
        },
    )

__all__ = [
    "LoadedCheckpoint",
    "MappedTrainer",
    "as_data",
    "from_lightning_arguments",
    "load_checkpoint",
]
