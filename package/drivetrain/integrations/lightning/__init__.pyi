from drivetrain.integrations.lightning.arguments import ArgumentDifference as ArgumentDifference
from drivetrain.integrations.lightning.arguments import MappedTrainer as MappedTrainer
from drivetrain.integrations.lightning.arguments import from_lightning_arguments as from_lightning_arguments
from drivetrain.integrations.lightning.checkpoint import LoadedCheckpoint as LoadedCheckpoint
from drivetrain.integrations.lightning.checkpoint import load_checkpoint as load_checkpoint
from drivetrain.integrations.lightning.data import as_data as as_data
from drivetrain.integrations.lightning.task import LightningTask as LightningTask
from drivetrain.integrations.lightning.task import as_task as as_task
