from drivetrain.integrations.trackers.base import Tracker as Tracker
from drivetrain.integrations.trackers.codecarbon import CodeCarbon as CodeCarbon
from drivetrain.integrations.trackers.dvclive import DVCLiveLogger as DVCLiveLogger
from drivetrain.integrations.trackers.mlflow import AzureMLLogger as AzureMLLogger
from drivetrain.integrations.trackers.mlflow import MLflowLogger as MLflowLogger
from drivetrain.integrations.trackers.trackio import TrackioLogger as TrackioLogger
from drivetrain.integrations.trackers.wandb import WandbLogger as WandbLogger
