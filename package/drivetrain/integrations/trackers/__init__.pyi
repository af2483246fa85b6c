from drivetrain.integrations.trackers.base import Tracker as Tracker
from drivetrain.integrations.trackers.mlflow import AzureMLLogger as AzureMLLogger
from drivetrain.integrations.trackers.mlflow import MLflowLogger as MLflowLogger
from drivetrain.integrations.trackers.wandb import WandbLogger as WandbLogger
