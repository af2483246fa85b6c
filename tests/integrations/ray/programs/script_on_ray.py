"""A search of a script over Ray, population-based: script_on_ray.py FOLDER; prints what it found as JSON."""

import json
import os
import sys
from pathlib import Path

import ray
import transformers
from ray import tune
from tests.integrations.transformers.families import model
from tests.integrations.transformers.test_search import CLASSES, made

folder = Path(sys.argv[1])


class Note(transformers.TrainerCallback):
    def on_evaluate(self, args, state, control, optimizer=None, **others):
        row = [state.trial_name, state.global_step, optimizer.param_groups[0]["lr"], state.trial_params]
        with (folder / "seen.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def model_init(trial):
    assert trial is None or "learning_rate" in trial
    return model(CLASSES)


environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", runtime_env={"env_vars": environment})
scheduler = tune.schedulers.PopulationBasedTraining(
    time_attr="training_iteration",
    metric="objective",
    mode="min",
    perturbation_interval=2,
    hyperparam_mutations={"learning_rate": tune.uniform(5e-3, 2e-2)},
    quantile_fraction=0.5,
    synch=True,
)
saving = {"save_strategy": "steps", "save_steps": 100, "lr_scheduler_type": "constant"}
trainer = made(folder / "out", model_init=model_init, max_steps=6, callbacks=[Note()], **saving)
best = trainer.hyperparameter_search(
    hp_space=lambda trial: {"learning_rate": tune.grid_search([1e-6, 1e-2])},
    backend="ray",
    n_trials=1,
    hp_name=lambda trial: f"rate {trial['learning_rate']:.6g}",
    scheduler=scheduler,
    storage_path=str(folder),
    verbose=0,
)
ends = {each.trial_id: each.last_result["objective"] for each in best.run_summary.trials}
(chosen,) = (each for each in best.run_summary.trials if each.trial_id == best.run_id)
loaded = transformers.AutoModelForSequenceClassification.from_pretrained(chosen.checkpoint.path)
again = made(folder / "again", model_init=lambda: loaded).evaluate()["eval_loss"]
print(json.dumps([best[:3], ends, sorted(os.listdir(folder / "out")), again]))
