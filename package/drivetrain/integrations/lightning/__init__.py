"""Lightning: modules as tasks, data modules as data, checkpoints' weights, and arguments."""

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
    from drivetrain.integrations.lightning.task import LightningTask, as_task
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.integrations.lightning.arguments": ("MappedTrainer", "from_lightning_arguments"),
            "drivetrain.integrations.lightning.checkpoint": ("LoadedCheckpoint", "load_checkpoint"),
            "drivetrain.integrations.lightning.data": ("as_data",),
            "drivetrain.integrations.lightning.task": ("LightningTask", "as_task"),
        },
    )

__all__ = [
    "LightningTask",
    "LoadedCheckpoint",
    "MappedTrainer",
    "as_data",
    "as_task",
    "from_lightning_arguments",
    "load_checkpoint",
]
