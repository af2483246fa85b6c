"""The search of a script over a sweep of W&B, offline: what the agent does around each trial is done here.

swept.py ours|theirs; prints what it found as JSON.
"""

import json
import os
import sys
from pathlib import Path

import transformers
import wandb
import yaml
from tests.integrations.transformers.families import model
from tests.integrations.transformers.test_search import CLASSES, made

from drivetrain.integrations.trackers.wandb_file import read_history

whose = sys.argv[1]
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(Path(whose).absolute()))
given, seen, states = [], [], []


def sweep(config, project=None, entity=None):
    given.append([config, project])
    return "a sweep"


def agent(sweep_id, function=None, entity=None, project=None, count=None):
    for number in range(count):
        values = {"learning_rate": {"value": 10.0 ** -(number + 1)}, "width": {"value": number}}
        path = Path(f"{whose}-{number}.yaml")
        path.write_text(yaml.dump({"wandb_version": 1, **values}))
        os.environ.update(WANDB_SWEEP_ID="s", WANDB_SWEEP_PARAM_PATH=str(path), WANDB_RUN_ID=f"run{number}")
        wandb.teardown()
        function()
        wandb.finish()


def model_init(trial):
    seen.append(trial and trial["width"])
    return model(CLASSES)


class Note(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **others):
        row = [state.is_hyper_param_search, state.trial_name, state.trial_params["width"], args.learning_rate]
        states.append(row)


Path(whose).mkdir()
wandb.sweep, wandb.agent = sweep, agent
kind = None if whose == "ours" else transformers.Trainer
trainer = made(Path(whose, "out"), kind, model_init=model_init, callbacks=[Note()])
best = trainer.hyperparameter_search(
    backend="wandb", n_trials=2, project="digits", hp_name=lambda trial: f"width {trial['width']}"
)
wandb.teardown()
rows = [row for path in sorted(Path(whose).rglob("*.wandb")) for row in read_history(path)]
chosen = {name: best.hyperparameters[name] for name in ("learning_rate", "width")}
logged = [row["eval/loss"] for row in rows if "eval/loss" in row]
print(json.dumps([best.run_id, best.objective, chosen, best.run_summary, given, seen, states, logged]))
