"""A MLFlowLogger of Lightning among the arguments of its Trainer."""

from lightning.pytorch.loggers import MLFlowLogger

from drivetrain.integrations.lightning import from_lightning_arguments

given = MLFlowLogger(
    "digits", tracking_uri="sqlite:///runs.db", run_name="small", tags={"kind": 1}, log_model="all"
)
(tracker,) = from_lightning_arguments(max_epochs=1, logger=given).trainer.loggers
tracker.log_metrics({"loss": 1.0}, 3)
tracker.close()
run = tracker.experiment.get_run(tracker.run_id)
name = tracker.experiment.get_experiment(run.info.experiment_id).name
print(name, run.info.run_name, run.data.tags["kind"], run.data.metrics, tracker.artifacts)
