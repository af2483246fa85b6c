"""The Trainer: its arguments, its verbs, and that no two runs disturb each other."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn

from drivetrain import (
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    DataError,
    LambdaCallback,
    OptimizerConfig,
    StrategyError,
    Trainer,
)

WRONG: list[tuple[str, Any, str]] = [
    *(
        (name, value, name)
        for name in (
            "max_steps",
            "min_epochs",
            "min_steps",
            "batch_size",
            "evaluation_batch_size",
            "gradient_accumulation_steps",
            "sanity_validation",
            "try_out",
        )
        for value in (0, -1, 1.5, "3", True)
    ),
    *(("max_epochs", value, "max_epochs") for value in (0, -0.5, "3", True, float("inf"))),
    *(
        (f"limit_{stage}_batches", value, stage)
        for stage in ("train", "validation", "test", "predict")
        for value in (0, 1.0, 2.5, 0.0, True, "0.5")
    ),
    ("max_time", 0, "max_time"),
    ("max_time", -3.0, "max_time"),
    ("max_time", "3 steps", "is not a time"),
    ("max_time", "3 parsecs", "unknown unit 'parsecs'"),
    ("max_time", timedelta(0), "positive"),
    ("strategy", "cup", "Did you mean 'cpu'"),
    ("strategy", 3, "strategy"),
    ("devices", 0, "devices"),
    ("devices", "two", "devices"),
    ("devices", [0, 0], "different indices"),
    ("num_nodes", 0, "num_nodes"),
    ("precision", "bf16", "Here it is called 'bf16-mixed'"),
    ("precision", 8, "unknown precision '8'.*'bf16-mixed'"),
    ("evaluation_precision", "32", "stores no weights in a dtype of its own"),
    ("evaluation_precision", "bf16-mixed", "Use 'bf16-true'"),
    ("evaluation_precision", "fp8", "stores no weights"),
    ("evaluation_precision", "bf16", "Here it is called"),
    ("max_grad_norm", 0, "max_grad_norm"),
    ("max_grad_norm", float("inf"), "max_grad_norm"),
    ("max_grad_norm", "1", "max_grad_norm"),
    ("max_grad_value", 0, "max_grad_value"),
    ("micro_batch", 0, "micro_batch"),
    ("micro_batch", 2.5, "micro_batch"),
    ("micro_batch", "automatic", "'auto'"),
    ("validate_every", 0, "positive"),
    ("validate_every", "1 epok", "Did you mean 'epochs'"),
    ("validate_every", "2.5 steps", "whole number of steps"),
    ("validate_from", 0, "positive"),
    ("log_first_step", 1, "log_first_step"),
    ("log_every", -1, "interval"),
    ("log_every", [3], "interval"),
    ("log_every", True, "interval"),
    ("checkpoint", "yes", "checkpoint must be"),
    ("checkpoint", None, "checkpoint must be"),
    ("checkpoint", "asynchronous", "'async'"),
    ("run_dir", "s3://bucket/run", r"CheckpointConfig\(directory="),
    ("assets", "vocabulary.txt", r"put the asset into a list, \[...\]"),
    ("callbacks", "early_stopping", "callbacks must be"),
    ("callbacks", LambdaCallback(), "callbacks must be"),
    ("callbacks", [LambdaCallback], "callbacks must be"),
    ("callbacks", [3], "callback"),
    ("loggers", "tensorbord", "Did you mean 'tensorboard'"),
    ("loggers", ("csv", "csv"), "twice"),
    ("loggers", 3, "no logger"),
    ("loggers", [print], "no logger"),
    ("progress_bar", "no", "progress_bar"),
    ("train_metrics", 1, "train_metrics"),
    ("compile", "yes", "compile"),
    ("memory", True, "memory is a MemoryConfig, a mapping of its options, or None"),
    ("deterministic", "false", "deterministic"),
    ("seed", -1, "seed"),
    ("seed", 1.0, "seed"),
    ("seed", None, "seed"),
    ("data_seed", -1, "data_seed"),
    ("collate", "pad", "collate must be a function"),
    ("group_by_length", True, "column or a function"),
    ("group_by_length", "", "column or a function"),
    ("run_name", "a/b", "run_name"),
    ("run_name", "..", "run_name"),
    ("run_name", 3, "run_name"),
    ("on_bad_batch", "ignore", "on_bad_batch"),
    ("on_save_error", "ignore", "on_save_error"),
    ("hang_timeout", 0, "hang_timeout"),
    ("on_nonfinite", "ignore", "on_nonfinite"),
    ("preemption", "SIGTERM", "preemption"),
    ("num_workers", -1, "num_workers"),
    ("run_dir", 3, "run_dir"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_argument_is_refused_at_construction(name: str, value: Any, message: str) -> None:
    with pytest.raises((ConfigError, StrategyError), match=message):
        Trainer(**{"max_epochs": 1, name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"validate_every": None, "validate_from": "1 epoch"}, "no validation to delay"),
        ({"validate_every": None, "sanity_validation": 2}, "needs no check of it"),
        ({"micro_batch": 2, "evaluation_precision": "bf16-true"}, "with micro_batch=2"),
        ({"max_grad_norm": 1.0, "max_grad_value": 1.0}, "two ways to clip"),
        (
            {"memory": {"release_gradients": True}, "max_grad_value": 1.0},
            "release_gradients with max_grad_value",
        ),
        ({"log_every": None, "log_first_step": True}, "log_every=None: give an interval"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(max_epochs=1, **given)


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no argument 'max_epoch'.*Did you mean 'max_epochs'"):
        Trainer(max_epoch=3)  # type: ignore[call-arg]


def test_arguments_are_given_by_name() -> None:
    with pytest.raises(ConfigError, match="by name"):
        Trainer(3)  # type: ignore[misc]


def test_every_argument_is_in_the_table() -> None:
    """So that an argument that is added later is checked too."""
    assert {name for name, _, _ in WRONG} == {field.name for field in dataclasses.fields(Trainer)}


def test_a_trainer_never_changes() -> None:
    trainer = quiet(max_epochs=1)
    before = trainer.to_json()
    with pytest.raises(dataclasses.FrozenInstanceError):
        trainer.max_epochs = 2  # type: ignore[misc]
    trainer.fit(Regression(), pairs(), pairs(4))
    assert trainer.to_json() == before
    assert json.loads(json.dumps(before)) == before


def test_a_fit_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match="how long to train"):
        quiet().fit(Regression(), pairs())


@pytest.mark.parametrize(
    ("task", "message"),
    [(Regression, r"pass an instance: Regression\("), (nn.Linear(2, 2), "Subclass drivetrain.TaskModule")],
)
def test_what_is_no_task_is_refused(task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_epochs=1).fit(task, pairs())


# Two runs in one process.


def fitted(**options: Any) -> Any:
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3)
    quiet(max_epochs=2, **options).fit(task, pairs(10, shuffle=True))
    return weights(task)


def test_two_fits_with_one_trainer_are_the_same() -> None:
    trainer = quiet(max_epochs=2)
    results = []
    for _ in range(2):
        task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3)
        result = trainer.fit(task, pairs(10, shuffle=True))
        results.append((weights(task), result.progress.updates, result.metrics))
    assert results[0] == results[1]
    assert results[0][0] == fitted()


def test_two_interleaved_trainers_do_not_disturb_each_other() -> None:
    def started(seed: int) -> tuple[Any, Iterator[Any]]:
        task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3)
        return task, quiet(max_epochs=2, seed=seed).steps(task, pairs(10, shuffle=True))

    (first, first_steps), (second, second_steps) = started(0), started(1)
    for _ in zip(first_steps, second_steps, strict=True):
        torch.randn(3), random.random(), np.random.rand()  # the body may draw too
    assert weights(first) == fitted(seed=0)
    assert weights(second) == fitted(seed=1)


def test_a_task_may_be_fitted_twice() -> None:
    task = Regression()
    quiet(max_epochs=1).fit(task, pairs())
    after_one = weights(task)
    quiet(max_epochs=1).fit(task, pairs())
    assert weights(task) != after_one


def test_gradients_from_before_do_not_count() -> None:
    tasks = Regression(), Regression()
    tasks[1].line(torch.ones(1, 4)).sum().mul(100).backward()
    for task in tasks:
        quiet(max_epochs=1).fit(task, pairs())
    assert weights(tasks[0]) == weights(tasks[1])


def test_a_fit_leaves_no_gradients_and_an_ordinary_module() -> None:
    task = Regression()
    quiet(max_epochs=1).fit(task, pairs())
    assert all(each.grad is None for each in task.parameters())
    assert task(torch.ones(2, 4)).shape == (2, 1)


# A loop of one's own over the Trainer's steps.


def test_steps_are_a_fit() -> None:
    task, trainer = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3), quiet(max_epochs=2)
    assert len(list(trainer.steps(task, pairs(10, shuffle=True)))) == 10
    assert weights(task) == fitted()


def test_what_the_body_changes_is_in_the_checkpoint_of_the_same_update(tmp_path: Path) -> None:
    task = Regression()
    trainer = quiet(max_steps=4, checkpoint=CheckpointConfig(every="2 steps", by=None), run_dir=tmp_path)
    for step in trainer.steps(task, pairs()):
        with torch.no_grad():
            task.line.bias.fill_(float(step.update))
    saved = tmp_path / "checkpoints" / "update-00000002"
    assert Regression.from_checkpoint(str(saved)).line.bias.tolist() == [1.0]


def test_leaving_the_loop_ends_the_run_in_order(tmp_path: Path) -> None:
    heard: list[Any] = []
    trainer = quiet(
        max_epochs=3,
        log_every="100 steps",
        checkpoint=True,
        loggers="csv",
        run_dir=tmp_path,
        callbacks=[LambdaCallback(on_fit_end=lambda run: heard.append(run.stop_reason))],
    )
    task = Regression()
    steps = trainer.steps(task, pairs())
    for step in steps:
        if step.update == 2:
            break
    steps.close()
    assert heard == ["the loop was left by its caller"]
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").startswith("step,train/loss\n3,")
    assert load_file(tmp_path / "model.safetensors").keys() == task.state_dict().keys()


@pytest.mark.parametrize("left_after", [1, 3, 5, 7])
def test_a_loop_that_was_left_is_gone_on_with_where_it_was_left(left_after: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path}
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3)
    steps = quiet(max_epochs=2, **options).steps(task, pairs(10, shuffle=True))
    for step in steps:
        if step.update + 1 == left_after:
            break
    steps.close()
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3)
    rest = list(quiet(max_epochs=2, **options).steps(task, pairs(10, shuffle=True), resume="auto"))
    assert [step.update for step in rest] == list(range(left_after, 10))
    assert weights(task) == fitted()


# Files.


def test_a_finished_model_loads_without_this_package(tmp_path: Path) -> None:
    task = Regression()
    result = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path).fit(task, pairs())
    assert result.model_path == str(tmp_path / "model.safetensors")
    other = Regression()
    other.load_state_dict(load_file(result.model_path), strict=True)
    assert weights(other) == weights(task)


def test_without_checkpoints_and_loggers_nothing_is_written(tmp_path: Path) -> None:
    result = quiet(max_epochs=1).fit(Regression(), pairs(), pairs(4))
    assert (result.run_dir, result.model_path, result.last_checkpoint) == (None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_directory_makes_a_new_one_each_time(tmp_path: Path) -> None:
    found = [quiet(max_epochs=1, checkpoint=True).fit(Regression(), pairs()).run_dir for _ in range(3)]
    assert len(set(found)) == 3
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {path.name for path in found if path}
    assert all(path is not None and path.name.startswith("Regression-") for path in found)


def test_the_run_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path)
    trainer.fit(Regression(), pairs())
    with pytest.raises(ConfigError, match=r"earlier run \(the newest after update 5\).*resume='auto'"):
        trainer.fit(Regression(), pairs())


def test_auto_begins_afresh_in_an_empty_directory(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path / "new")
    assert trainer.fit(Regression(), pairs(), resume="auto").progress.updates == 5


def test_auto_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="give the Trainer a run_dir"):
        quiet(max_epochs=1).fit(Regression(), pairs(), resume="auto")


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path)
    task = Regression()
    trainer.fit(task, pairs())
    again = Regression()
    result = trainer.fit(again, pairs(), resume="auto")
    assert (result.progress.updates, result.stop_reason) == (5, "max_epochs=1 reached")
    assert weights(again) == weights(task)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        quiet(max_epochs=1).fit(Regression(), pairs(), resume=str(tmp_path / "nothing"))


def test_the_result_names_the_best_and_the_last_checkpoint(tmp_path: Path) -> None:
    worse = iter([3.0, 1.0, 2.0])

    class Planted(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            return torch.tensor(next(worse))

    trainer = quiet(max_epochs=3, checkpoint=True, run_dir=tmp_path)
    result = trainer.fit(Planted(), pairs(), pairs(2))
    assert result.best_checkpoint is not None
    assert result.last_checkpoint is not None
    assert result.best_checkpoint.endswith("update-00000010")
    assert result.last_checkpoint.endswith("update-00000015")


# Evaluation and prediction.


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_writes_its_values_to_a_file(tmp_path: Path, verb: str) -> None:
    evaluate, target = getattr(quiet(), verb), tmp_path / "new" / "results.json"
    for data in (pairs(4), {"a": pairs(4), "b": pairs(6)}):  # the second replaces the first
        values = evaluate(Regression(), data, save_to=target)
        assert json.loads(target.read_text()) == values


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("folder", r"is a directory; give a file, such as 'results\.json'"),
        ("file/results.json", r"cannot be written: .*'.*file'"),
        ("s3://bucket/results.json", "must be a path on a local disk"),
        (3, "must be a path on a local disk, such as 'results', not 3"),
    ],
)
def test_results_that_could_not_be_written_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()

    class Never(Regression):
        def forward(self, features: Tensor) -> Tensor:
            raise AssertionError

    for verb in ("validate", "test"):
        with pytest.raises(ConfigError, match=words):
            getattr(quiet(), verb)(Never(), pairs(4), save_to=given)
    if given in ("folder", "file/results.json"):
        return
    with pytest.raises(ConfigError, match=words):
        quiet().predict(Never(), pairs(4), save_to=given)


def test_a_folder_that_cannot_be_made_stops_a_prediction_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot create '.*folder': Not a directory"):
        quiet().predict(Regression(), pairs(4), save_to=tmp_path / "file" / "folder")


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_can_load_weights_first(verb: str, tmp_path: Path) -> None:
    trainer = quiet(max_epochs=2, checkpoint=True, run_dir=tmp_path)
    task = Regression()
    result = trainer.fit(task, pairs(), pairs(4))
    evaluate = getattr(trainer, verb)
    right = evaluate(task, pairs(4))
    assert evaluate(Regression(), pairs(4)) != right
    for where in ("last", "best", str(tmp_path), result.last_checkpoint):
        assert evaluate(Regression(), pairs(4), checkpoint=where) == right


def test_best_without_a_keeper_says_so(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path)
    trainer.fit(Regression(), pairs())
    with pytest.raises(ConfigError, match=r"checkpoint=True\. Give 'best' or 'last'"):
        trainer.validate(Regression(), pairs(), checkpoint=True)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        trainer.validate(Regression(), pairs(4), checkpoint="best")


def test_named_loaders_give_named_metrics() -> None:
    loaders = {"near": pairs(4), "far": pairs(6, seed=9)}
    values = quiet().validate(Regression(), loaders)
    assert set(values) == {"validation/near/loss", "validation/far/loss"}
    assert values["validation/near/loss"] == quiet().validate(Regression(), pairs(4))["validation/loss"]
    assert set(quiet().test(Regression(), loaders)) == {"test/near/loss", "test/far/loss"}


def test_declared_metrics_are_computed_for_each_loader_by_itself() -> None:
    from torchmetrics import MeanAbsoluteError

    class Measured(Regression):
        def metrics(self) -> dict[str, Any]:
            return {"error": MeanAbsoluteError()}

    values = quiet().validate(Measured(), {"near": pairs(4), "far": pairs(6, seed=9)})
    for name, data in (("near", pairs(4)), ("far", pairs(6, seed=9))):
        alone = quiet().validate(Measured(), data)
        assert values[f"validation/{name}/error"] == alone["validation/error"]


def test_predictions_come_in_the_datasets_order_though_the_loader_shuffles() -> None:
    task = Regression()
    plain = quiet().predict(task, pairs(7))
    shuffled = quiet().predict(task, pairs(7, shuffle=True))
    assert [len(each) for each in shuffled] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(plain), torch.cat(shuffled))
    assert not any(each.requires_grad for each in plain)


def test_a_prediction_takes_one_loader() -> None:
    with pytest.raises(ConfigError, match="one loader"):
        quiet().predict(Regression(), {"a": pairs(2)})


def test_two_optimizers_are_resumed_bitwise(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(duels(), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    whole = Duel()
    quiet(max_epochs=2, gradient_accumulation_steps=2).fit(whole, data)
    options: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path, "gradient_accumulation_steps": 2}
    quiet(max_steps=4, **options).fit(Duel(), data)
    task = Duel()
    quiet(max_epochs=2, **options).fit(task, data, resume="auto")
    assert weights(task) == weights(whole)


def test_empty_training_data_is_an_error() -> None:
    with pytest.raises(DataError, match="training data is empty"):
        quiet(max_epochs=1).fit(Regression(), [])
