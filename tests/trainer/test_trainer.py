"""The Trainer: its verbs and their files, and that no two runs disturb each other."""

import dataclasses
import inspect
import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import nn

from drivetrain import (
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    EarlyStopping,
    Freeze,
    LambdaCallback,
    MemoryConfig,
    OptimizerConfig,
    Trainer,
)


def dropping() -> Regression:
    return Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.3)


def fitted(**options: Any) -> Any:
    quiet(max_epochs=2, **options).fit(task := dropping(), pairs(10, shuffle=True))
    return weights(task)


def test_a_fit_names_the_modules_in_evaluation_mode_as_it_starts_and_keeps_them_so() -> None:
    for part, level, named in (
        ("dropout", logging.INFO, "'dropout'"),
        ("", logging.WARNING, "the whole task"),
    ):
        task = Regression(dropout=0.5)
        task.get_submodule(part).eval()
        before = [each.training for each in task.modules()]
        with heard(f"starts with {named} in evaluation mode", level) as texts:
            quiet(max_steps=1).fit(task, pairs())
        assert len(texts) == 1
        assert [each.training for each in task.modules()] == before
    frozen = Regression()
    frozen.norm = nn.BatchNorm1d(1)
    with heard("evaluation mode", logging.INFO) as texts:
        quiet(max_steps=1).fit(Regression(), pairs())
        quiet(max_steps=1, callbacks=[Freeze("norm")]).fit(frozen, pairs())
    assert texts == []
    assert frozen.norm.training


def test_a_fit_that_ends_early_says_why() -> None:
    def stop(run: Any) -> None:
        run.stop("enough")

    for options, expected in (({"callbacks": [LambdaCallback(on_step_end=stop)]}, 1), ({}, 0)):
        with heard("ended early, after step 1 of 5: enough", logging.INFO) as texts:
            quiet(max_epochs=1, **options).fit(Regression(), pairs())
            assert len(list(quiet(max_epochs=1, **options).steps(Regression(), pairs()))) == 5 - 4 * expected
        assert len(texts) == 2 * expected
    with heard("ended early", logging.INFO) as texts:
        quiet(max_epochs=1).find_learning_rate(Regression(), pairs(), highest=1e9, steps=40)
    assert texts == []


def test_the_callback_whose_state_cannot_be_taken_is_named(tmp_path: Path) -> None:
    odd = type("Odd", (LambdaCallback,), {"state_dict": lambda self: 1 / 0, "load_state_dict": print})()
    with pytest.raises(CheckpointError, match=r"callback Odd could not be taken: .*ZeroDivisionError"):
        quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path, callbacks=[odd]).fit(Regression(), pairs())


def test_a_trainer_never_changes_and_its_fits_are_the_same() -> None:
    trainer = quiet(max_epochs=2)
    before = trainer.to_json()
    with pytest.raises(dataclasses.FrozenInstanceError):
        trainer.max_epochs = 2  # type: ignore[misc]
    fits = [trainer.fit(Regression(dropout=0.3), pairs(shuffle=True)).metrics for _ in range(2)]
    assert fits[0] == fits[1]
    assert trainer.to_json() == before
    assert json.loads(json.dumps(before)) == before


def test_two_interleaved_trainers_do_not_disturb_each_other() -> None:
    tasks = [dropping(), dropping()]
    loops = [
        quiet(max_epochs=2, seed=seed).steps(task, pairs(10, shuffle=True)) for seed, task in enumerate(tasks)
    ]
    for _ in zip(*loops, strict=True):
        torch.randn(3), random.random(), np.random.rand()  # the body may draw too
    assert [weights(task) for task in tasks] == [fitted(seed=0), fitted(seed=1)]


def test_a_fit_leaves_no_gradients_and_takes_none_and_the_task_may_be_fitted_again() -> None:
    tasks = Regression(), Regression()
    tasks[1].line(torch.ones(1, 4)).sum().mul(100).backward()  # gradients from before do not count
    for task in tasks:
        quiet(max_epochs=1).fit(task, pairs())
        assert all(each.grad is None for each in task.parameters())
        assert task(torch.ones(2, 4)).shape == (2, 1)
    assert weights(tasks[0]) == weights(tasks[1])
    quiet(max_epochs=1).fit(tasks[0], pairs())
    assert weights(tasks[0]) != weights(tasks[1])


def test_steps_are_a_fit_and_their_body_comes_before_the_save(tmp_path: Path) -> None:
    assert len(list(quiet(max_epochs=2).steps(task := dropping(), pairs(10, shuffle=True)))) == 10
    assert weights(task) == fitted()
    policy = CheckpointConfig(every="2 steps", by=None)
    task = Regression()
    for result in quiet(max_steps=4, checkpoint=policy, run_dir=tmp_path).steps(task, pairs()):
        with torch.no_grad():
            task.line.bias.fill_(float(result.step))
    saved = tmp_path / "checkpoints" / "step-00000002"
    assert Regression.from_checkpoint(str(saved)).line.bias.tolist() == [1.0]


def test_leaving_the_loop_ends_the_run_in_order(tmp_path: Path) -> None:
    heard: list[Any] = []
    watch = LambdaCallback(on_fit_end=lambda run: heard.append(run.stop_reason))
    options: Any = {"log_every": "100 steps", "checkpoint": True, "loggers": "csv", "run_dir": tmp_path}
    steps = quiet(max_epochs=3, callbacks=[watch], **options).steps(task := Regression(), pairs())
    for result in steps:
        if result.step == 2:
            break
    steps.close()
    assert heard == ["the loop was left by its caller"]
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").startswith("step,train/loss\n3,")
    other = Regression()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert weights(other) == weights(task)


def test_run_dir_is_new_each_time_or_none(tmp_path: Path) -> None:
    result = quiet(max_epochs=1).fit(Regression(), pairs(), pairs(4))
    assert (result.run_dir, result.model_path, result.last_checkpoint) == (None, None, None)
    assert list(tmp_path.iterdir()) == []  # without checkpoints and loggers
    found = [quiet(max_epochs=1, checkpoint=True).fit(Regression(), pairs()).run_dir for _ in range(3)]
    assert len(set(found)) == 3
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {path.name for path in found if path}
    assert all(path is not None and path.name.startswith("Regression-") for path in found)


def test_resume_of_two_optimizers_is_bitwise(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(duels(), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    whole, task = Duel(), Duel()
    quiet(max_epochs=2, gradient_accumulation_steps=2).fit(whole, data)
    options: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path, "gradient_accumulation_steps": 2}
    quiet(max_steps=4, **options).fit(Duel(), data)
    quiet(max_epochs=2, **options).fit(task, data, resume="auto")
    assert weights(task) == weights(whole)


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_loads_weights_first(tmp_path: Path, verb: str) -> None:
    trainer = quiet(max_epochs=2, checkpoint=True, run_dir=tmp_path)
    result = trainer.fit(task := Regression(), pairs(), pairs(4))
    evaluate = getattr(trainer, verb)
    right = evaluate(task, pairs(4))
    assert evaluate(Regression(), pairs(4)) != right
    for where in ("last", "best", str(tmp_path), result.last_checkpoint):
        assert evaluate(Regression(), pairs(4), checkpoint=where) == right


GROUPS = ("Length", "Where it runs", "Numbers", "Gradient", "Data", "Evaluation", "Records", "Safety")


def test_every_argument_is_in_one_group_of_the_docstring_with_its_default_and_an_example() -> None:
    doc = str(inspect.getdoc(Trainer)).partition("\n\nRaises:")[0]
    parts = [each.partition("\n") for each in re.split(r"(?m)^Attributes: ", doc)[1:]]
    assert tuple(title for title, _, _ in parts) == GROUPS
    arguments = re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w|\Z)", "\n".join(rest for _, _, rest in parts))
    fields = {each.name: each.default for each in dataclasses.fields(Trainer)}
    assert [name for name, _ in arguments] == [*fields]  # each once, and the signature in the same order
    known = {each.__name__: each for each in (CheckpointConfig, EarlyStopping, MemoryConfig)} | {"pad": list}
    Path("vocabulary.txt").write_text("a", encoding="utf-8")  # one example's
    for name, text in arguments:
        found = re.search(r" Default: (.*)\. Example: (.*)\.$", " ".join(text.split()))
        assert found, name
        default, example = found.groups()
        assert eval(default) == fields[name], name
        assert example.startswith(f"{name}="), name
        given = eval(f"dict({example})", known)
        assert getattr(Trainer(**given), name) != fields[name], name


def test_a_result_is_plotted_and_a_fit_ends_with_how_to_see_its_curves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "drivetrain"):
        result = quiet(max_epochs=2, loggers="csv", run_dir=tmp_path).fit(Regression(), pairs(), pairs(2))
    assert f"curves: drivetrain runs report {tmp_path}" in caplog.messages
    shared, *others = result.plot().axes
    assert not others
    lines = {each.get_label(): list(zip(*each.get_data(), strict=True)) for each in shared.get_lines()}
    for name, points in lines.items():
        assert points == [(row["step"], row[name]) for row in result.history if name in row]
    assert lines.keys() == {"train/loss", "validation/loss"}
    with pytest.raises(ConfigError, match=r"no value 'train/los' was logged.*train/loss"):
        result.plot("train/los")
