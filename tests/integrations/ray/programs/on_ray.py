"""A program on a local Ray: on_ray.py asha|pbt|train FOLDER; prints what it found as JSON."""

import json
import os
import sys
from pathlib import Path

import ray
from ray import train, tune
from ray.train.torch import TorchTrainer
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.integrations.ray import RayReport, trainable

kind, folder = sys.argv[1:]
SAVING = CheckpointConfig(every="1 epoch")


class Rated(Regression):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(OptimizerConfig("adamw", lr=lr))


def note(run):  # the step, the rate and the weights with which a fit begins or ends, and its process
    optimizer = next(iter(run.engine.updaters.values())).optimizer
    row = [run.progress.steps, optimizer.param_groups[0]["lr"], run.task.line.weight.detach().tolist()]
    with Path(folder, "seen.jsonl").open("a") as file:
        file.write(json.dumps([os.getpid(), run.engine.ranks.rank, *row]) + "\n")


def fit_in_a_worker(config):
    settings = {"strategy": "ddp", "devices": 2, "preemption": False}
    settings["callbacks"] = [RayReport(), LambdaCallback(on_fit_end=note)]
    trainer = quiet(max_epochs=2, checkpoint=SAVING, run_dir=f"{folder}/fit", **settings)
    trainer.fit(Rated(), pairs(8), pairs(8))


environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
cores = 3 if kind == "train" else 2  # Ray 2.44 takes one beside those of the two workers
ray.init(
    num_cpus=cores, include_dashboard=False, logging_level="ERROR", runtime_env={"env_vars": environment}
)
if kind == "train":
    scaling, files = train.ScalingConfig(num_workers=2), train.RunConfig(storage_path=folder)
    results = [TorchTrainer(fit_in_a_worker, scaling_config=scaling, run_config=files).fit()]
else:
    scheduler = tune.schedulers.ASHAScheduler(grace_period=1, max_t=4, reduction_factor=2)
    epochs, rates, notes = 4, [0.3, 1e-4, 1e-5, 1e-6], {}
    if kind == "pbt":
        scheduler = tune.schedulers.PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=2,
            hyperparam_mutations={"lr": tune.uniform(0.1, 0.3)},
            quantile_fraction=0.5,
            synch=True,
        )
        epochs, rates, notes = 3, [1e-6, 0.2], {"on_fit_start": note, "on_epoch_end": note}
    fit = trainable(
        lambda config: Rated(config["lr"]),
        (pairs(8), pairs(8)),
        trainer=quiet(max_epochs=epochs, checkpoint=SAVING, callbacks=[LambdaCallback(**notes)]),
    )
    config = tune.TuneConfig(metric="validation/loss", mode="min", scheduler=scheduler, reuse_actors=True)
    files = tune.RunConfig(storage_path=folder, verbose=0)
    space = {"lr": tune.grid_search(rates)}
    results = [*tune.Tuner(fit, param_space=space, tune_config=config, run_config=files).fit()]
found = []
for each in results:
    task = Rated.from_checkpoint(each.checkpoint.path)
    found.append(
        {
            "error": str(each.error or ""),
            "steps": each.metrics["steps"],
            "loss": each.metrics["validation/loss"],
            "again": quiet().validate(task, pairs(8))["validation/loss"],
            "lr": each.config["lr"] if kind != "train" else None,
        }
    )
print(json.dumps(found))
