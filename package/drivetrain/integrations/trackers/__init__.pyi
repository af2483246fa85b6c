from drivetrain.integrations.trackers.base import Tracker as Tracker
from drivetrain.integrations.trackers.wandb import WandbLogger as WandbLogger
