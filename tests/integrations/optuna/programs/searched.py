"""A search that is killed at a point of its third trial: searched.py RUN_DIR STORAGE POINT PARALLEL."""

import json
import os
import signal
import sys
from pathlib import Path

from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from safetensors.torch import load_file
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.integrations.optuna import search

run_dir, storage, point, parallel = sys.argv[1:]
third = Path(run_dir, "trial-0002")


def die(at, is_third):  # once; a trial in a process of its own each time
    mark = Path(f"{run_dir}-{point}")
    if at == point and is_third and (parallel != "1" or not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def end_search(run):
    if point == "parent" and run.run_dir == third and run.progress.steps == 5:
        os.kill(os.getppid(), signal.SIGTERM)


def make_task(parameters):
    die("make_task", third.exists())
    task = Regression(OptimizerConfig("adamw", lr=parameters["lr"]), dropout=parameters["dropout"])
    watch = LambdaCallback(
        on_step_end=lambda run: die("step", run.run_dir == third and run.progress.steps == 5),
        on_fit_end=lambda run: die("end", run.run_dir == third),
    )
    return task, {"callbacks": (watch, LambdaCallback(on_step_end=end_search))}


result = search(
    make_task,
    (pairs(12), pairs(8)),
    {"lr": (1e-3, 0.5, "log"), "dropout": [0.0, 0.1]},
    trainer=quiet(max_epochs=2, run_dir=run_dir, checkpoint=CheckpointConfig(every="3 steps")),
    trials=5,
    sampler=lambda seed: TPESampler(seed=seed, n_startup_trials=2),
    pruner=MedianPruner(n_startup_trials=1),
    storage=storage or None,
    parallel=int(parallel),
)
rows = [
    [each.number, each.state, each.parameters, each.values, each.steps, each.failure]
    for each in result.trials
]
weights = [each.model_path and load_file(each.model_path)["line.weight"].tolist() for each in result.trials]
print(json.dumps([rows, weights]))
