"""A CometLogger of Lightning among the arguments of its Trainer."""

import comet_ml
from lightning.pytorch.loggers import CometLogger

from drivetrain.integrations.lightning import from_lightning_arguments

own = comet_ml.start(project_name="digits", online=False)
given = CometLogger(project="digits")  # uses the open experiment
(tracker,) = from_lightning_arguments(max_epochs=1, logger=given).trainer.loggers
tracker.log_metrics({"loss": 1.0}, 3)
tracker.close()
found = tracker.experiment
print(found.project_name, found is own, own.alive)
own.end()
