"""`hyperparameter_search` of a script's Trainer, beside transformers' own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, rows
from tests.integrations.transformers.test_trainer import CLASSES, even, trainer
from tests.support.forked import run_forked, undisturbed
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused

from drivetrain.core.errors import ConfigError

optuna = pytest.importorskip("optuna", reason="the extra search is not installed")
hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("programs") / "swept.py"
SEEN: list[Any] = []


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def made(folder: Path, kind: Any = None, **options: Any) -> Any:
    def model_init(trial: Any) -> Any:
        SEEN.append(getattr(trial, "number", trial))
        return model(CLASSES)

    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(CLASSES, 6), "max_steps": 4}
    given = {"data": even(CLASSES, 8), "model_init": model_init, **evaluated}
    return trainer(folder, kind, **{**given, **options})


def search(given: Any, **options: Any) -> Any:
    options = {"hp_space": space, "n_trials": 2, "backend": "optuna", **options}
    return given.hyperparameter_search(sampler=optuna.samplers.RandomSampler(seed=1), **options)


def test_a_search_finds_what_transformers_finds(tmp_path: Path) -> None:
    SEEN.clear()
    ours, theirs = made(tmp_path / "ours"), made(tmp_path / "theirs", transformers.Trainer)
    best, other = search(ours), search(theirs)
    assert (best.run_id, best.hyperparameters) == (other.run_id, other.hyperparameters)
    assert best.objective == pytest.approx(other.objective, rel=1e-4)
    assert SEEN == [None, None, 0, 1, 0, 1]
    assert ours.args.learning_rate == theirs.args.learning_rate  # of the last trial
    assert ours.args.output_dir == str(tmp_path / "ours")


def test_a_pruned_trial_ends_and_the_state_names_the_trial(tmp_path: Path) -> None:
    states: list[Any] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            names = state.is_hyper_param_search, state.trial_name, state.trial_params["learning_rate"]
            states.append((*names, state.global_step))

    given = made(tmp_path, callbacks=[Watch()], save_strategy="steps", save_steps=2)
    options = {"hp_name": lambda trial: f"rate-{trial.number}", "study_name": "rates"}
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(ValueError, match="No trials are completed"):  # of Optuna
        search(given, pruner=optuna.pruners.ThresholdPruner(upper=1e-3), storage=storage, **options)
    rates = [
        each.params["learning_rate"] for each in optuna.load_study(study_name="rates", storage=storage).trials
    ]
    assert states == [(True, f"rate-{number}", rate, 2) for number, rate in enumerate(rates)]
    assert (tmp_path / "rate-1" / "checkpoints").is_dir()
    with warned("no option of TrainingArguments"):
        several = search(
            made(tmp_path / "several"),
            hp_space=lambda trial: {"width": trial.suggest_int("width", 1, 2)},
            compute_objective=lambda metrics: [metrics["eval_loss"], 1.0],
            direction=["minimize", "maximize"],
        )
    assert len(several[0].objective) == 2


def on_rank(folder: Path) -> Any:
    SEEN.clear()
    given = made(folder, ddp_backend="gloo")
    return search(given, n_trials=2), SEEN, given.args.learning_rate


def test_both_ranks_train_the_trials_of_the_first(tmp_path: Path) -> None:
    first, second = on_two_ranks(on_rank, tmp_path)
    assert first[0].hyperparameters
    assert second[0] is None
    assert first[1:] == second[1:]


@pytest.mark.landing
def test_a_sweep_becomes_the_arguments_of_each_trial_as_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**undisturbed(), "PYTHONPATH": os.pathsep.join(paths)}
    found = []
    for whose in ("ours", "theirs"):
        done = run_forked([str(PROGRAM), whose], tmp_path, environment, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    ours, theirs = found
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert ours[2:7] == theirs[2:7]
    assert len(ours[7]) == 4  # two evaluations of each trial, under the name that the sweep goes by
    assert ours[7] == pytest.approx(theirs[7], rel=1e-4)


def test_refused(tmp_path: Path) -> None:
    given = made(tmp_path)
    rows_ = {
        "threads": (lambda: search(given, n_jobs=2), "in threads", "parallel="),
        "no model_init": (lambda: search(trainer(tmp_path)), "model_init"),
        "SigOpt": (lambda: search(given, backend="sigopt"), "has ended", "backend='optuna'"),
        "another's option": (
            lambda: given.hyperparameter_search(backend="wandb", metrik="eval/loss"),
            "Did you mean 'metric'",
        ),
        "Optuna's space": (lambda: given.hyperparameter_search(space, backend="wandb"), "gets None"),
        "no sweep": (
            lambda: given.hyperparameter_search(lambda trial: {"learning_rate": 1.0}, backend="wandb"),
            "configuration of a sweep",
        ),
        "two directions": (
            lambda: given.hyperparameter_search(backend="wandb", direction=["minimize", "maximize"]),
            "one objective",
        ),
        "another": (lambda: search(given, backend="optona"), "Did you mean 'optuna'"),
    }
    assert_refused(ConfigError, rows_)
