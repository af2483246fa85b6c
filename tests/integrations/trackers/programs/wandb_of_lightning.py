"""A WandbLogger of Lightning among the arguments of its Trainer."""

from lightning.pytorch.loggers import WandbLogger

from drivetrain.integrations.lightning import from_lightning_arguments

given = WandbLogger(
    offline=True, project="digits", name="small", version="abc", tags=["t"], group="sizes", save_dir="."
)
(tracker,) = from_lightning_arguments(max_epochs=1, logger=given).trainer.loggers
tracker.log_metrics({"loss": 1.0}, 3)
run = tracker.experiment
print(run.project, run.name, run.id, run.tags, run.group, run.offline)
tracker.close()
