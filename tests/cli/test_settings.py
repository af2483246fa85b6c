"""The arguments of a run: from the command line, from a file, and what they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from torch.utils.data import default_collate

from drivetrain import ConfigError, DDPConfig, EarlyStopping, Float8
from drivetrain.cli.references import importable_here
from drivetrain.cli.settings import Settings
from drivetrain.loggers import CSVLogger

FIT = "--task shapes.Shapes --data shapes.Data --trainer.max_epochs 2"
QUIET = "--trainer.loggers= --trainer.progress_bar false"

TYPED = """
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

from drivetrain import TaskModule


@dataclass
class Policy:
    every: int = 1
    best: int = 1


class Typed(TaskModule):
    \"\"\"A task.

    Args:
        whole: A whole number, of 100 % or less.
    \"\"\"

    def __init__(
        self,
        whole: int = 0,
        number: float = 0.0,
        flag: bool = False,
        text: str = "",
        maybe: int | None = 1,
        either: int | str = 0,
        kind: Literal["relu", "tanh"] = "relu",
        sizes: list[int] = [],
        pair: tuple[float, float] = (0.0, 0.0),
        options: Optional[dict[str, Any]] = None,
        policy: Policy = Policy(),
        path: Path | None = None,
        rate=0.5,
    ):
        super().__init__()
        self.given = dict(vars())


class Inheriting(Typed):
    def __init__(self, extra: int = 1, **rest):
        super().__init__(**rest)


class Loud:
    def on_fit_start(self, run):
        pass
"""


def settings(line: str) -> Settings:
    with importable_here():
        return Settings("fit", "train", line.split())


@pytest.fixture
def typed(write):
    write("typed.py", f"from pathlib import Path\n{TYPED}")
    return lambda line: settings(f"--task typed.Typed {line}").make("task").given


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--task.whole 3", "whole", 3),
        ("--task.whole -2", "whole", -2),
        ("--task.number 3", "number", 3.0),
        ("--task.number=-1e-3", "number", -0.001),
        ("--task.flag true", "flag", True),
        ("--task.flag False", "flag", False),
        ("--task.flag yes", "flag", True),
        ("--task.text 3", "text", "3"),
        ("--task.text none", "text", "none"),
        ("--task.text a,b", "text", "a,b"),
        ("--task.text=", "text", ""),
        ("--task.maybe none", "maybe", None),
        ("--task.maybe 3", "maybe", 3),
        ("--task.either 2", "either", 2),
        ("--task.either auto", "either", "auto"),
        ("--task.kind tanh", "kind", "tanh"),
        ("--task.sizes 1,2,3", "sizes", [1, 2, 3]),
        ("--task.sizes [1,2]", "sizes", [1, 2]),
        ("--task.sizes ()", "sizes", []),
        ("--task.sizes+=1 --task.sizes+=2", "sizes", [1, 2]),
        ("--task.pair (0.9,0.95)", "pair", (0.9, 0.95)),
        ('--task.options {"a":1}', "options", {"a": 1}),
        ("--task.policy.best 3", "policy", {"every": 1, "best": 3}),
        ("--task.path a/b", "path", Path("a/b")),
        ("--task.rate 1", "rate", 1.0),
    ],
)
def test_a_text_becomes_what_the_annotation_asks_for(typed, line, name, value):
    found = typed(line)[name]
    found = vars(found) if name == "policy" else found
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--task.whole x", "--task.whole must be a whole number, not 'x'"),
        ("--task.maybe 1.5", "--task.maybe must be a whole number or none, not '1.5'"),
        ("--task.flag 2", "--task.flag must be true or false, not '2'"),
        ("--task.sizes a,b", "--task.sizes must be a whole number"),
        ("--task.kind gelu", "--task.kind must be 'relu' or 'tanh', not 'gelu'"),
        ("--task.policy.bets 1", "Did you mean 'best'?"),
        ("--task.sizes.x 1", "--task.sizes must be a list (a,b,c), not \"{'x': '1'}\""),
        ("--task.whloe 1", "Typed has no argument 'whloe'. Did you mean 'whole'?"),
    ],
)
def test_a_text_that_does_not_fit_is_told_what_would(typed, line, message):
    with pytest.raises(ConfigError) as caught:
        typed(line)
    assert message in str(caught.value)


def test_arguments_that_a_constructor_passes_on_are_known_with_their_types(typed):
    found = settings("--task typed.Inheriting --task.extra 3 --task.whole 4").make("task")
    assert found.given["whole"] == 4


def test_both_spellings_and_the_last_value_count(here):
    found = settings(f"{QUIET} --trainer.max-epochs 3 --trainer.seed 1 --trainer.seed=2").trainer()
    assert (found.max_epochs, found.seed) == (3, 2)


def test_a_function_is_given_by_its_path_and_a_column_by_its_name(here):
    words = f"{QUIET} --trainer.collate torch.utils.data.default_collate --trainer.group_by_length tokens"
    given = settings(f"{words} --trainer.max_epochs 2.5")
    assert given.trainer().collate is default_collate
    shown = yaml.safe_load(given.as_file())["trainer"]
    assert shown["collate"].endswith(".default_collate")
    assert (shown["group_by_length"], shown["max_epochs"]) == ("tokens", 2.5)


def test_parts_make_the_configurations_of_the_trainer(here):
    trainer = settings(
        f"{QUIET} --trainer.strategy ddp --trainer.strategy.bucket_mb 50 --trainer.checkpoint.every 5"
        " --trainer.checkpoint.best 0 --trainer.validate_every 7 --trainer.preemption.requeue USR1,USR2"
    ).trainer()
    assert trainer.strategy == DDPConfig(bucket_mb=50.0)
    assert str(trainer.checkpoint.every) == "5 steps"
    assert str(trainer.validate_every) == "7 steps"
    assert list(trainer.preemption.requeue) == ["SIGUSR1", "SIGUSR2"]


def test_the_options_of_a_named_strategy_keep_what_the_name_stands_for(here):
    line = f"{QUIET} --trainer.strategy zero2 --trainer.strategy.stage 3"
    with pytest.raises(ConfigError, match="stands for stage=2"):
        settings(line).trainer()


def test_options_of_a_precision_stand_beside_its_name(here, monkeypatch):
    monkeypatch.setattr("drivetrain.strategies.precision.float8.is_installed", lambda package: True)
    line = (
        f"{QUIET} --trainer.strategy cpu --trainer.precision fp8 --trainer.precision.emulate yes"
        " --trainer.precision.recipe rowwise --trainer.precision.leave_out lm_head,*.router"
    )
    expected = Float8(recipe="rowwise", leave_out=("lm_head", "*.router"), emulate=True)
    assert settings(line).trainer().precision == expected
    Path("config.yaml").write_text(settings(line).as_file(), encoding="utf-8")
    assert settings("--config config.yaml").trainer().precision == expected
    other = settings("--config config.yaml --trainer.precision 32").trainer()
    assert other.precision.name == "32"


def test_callbacks_and_loggers_are_made_from_class_paths(write):
    write("typed.py", f"from pathlib import Path\n{TYPED}")
    trainer = settings(
        "--trainer.callbacks+=drivetrain.EarlyStopping --trainer.callbacks.patience 3"
        " --trainer.callbacks+=typed.Loud --trainer.loggers+=drivetrain.CSVLogger"
        " --trainer.loggers.directory logs --trainer.progress_bar false"
    ).trainer()
    stopping, loud = trainer.callbacks
    assert isinstance(stopping, EarlyStopping)
    assert stopping.patience == 3
    assert type(loud).__name__ == "Loud"
    assert isinstance(trainer.loggers[0], CSVLogger)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--trainer.precision.recipe rowwise", "give --trainer.precision NAME too"),
        ("--trainer.precision fp8 --trainer.precision.recipe rowise", "Did you mean 'rowwise'?"),
        ("--trainer.precision fp8 --trainer.precision.filter_fqns x", "Here it is called 'leave_out'."),
        ("--trainer.precision 32 --trainer.precision.recipe rowwise", "Precision has no argument 'recipe'"),
        ("--trainer.strategy ddpp", "Did you mean 'ddp'?"),
        ("--trainer.nosuch.part 1", "Trainer has no argument 'nosuch'."),
        ("--trainer.gradient_clip_val 1", "Here it is called 'max_grad_norm'."),
        ("--trainer.checkpoint.save_top_k 1", "Here it is called 'best'."),
        ("--trainer.memory.offload 1", "Did you mean 'offload_at_least'?"),
        ("--trainer.callbacks drivetrain.EarlyStopping --trainer.callbacks.monitor x", "called 'metric'"),
        (
            "--trainer.callbacks drivetrain.EarlyStopping --trainer.callbacks.patience x",
            "callbacks.patience must",
        ),
        ("--trainer.callbacks drivetrain.EarlyStoping", "Did you mean 'EarlyStopping'?"),
        ("--trainer.callbacks drivetrain.Every", "drivetrain.Every is no Callback"),
        ("--trainer.loggers cvs", "Did you mean 'csv'?"),
        (
            "--trainer.loggers+=drivetrain.CSVLogger",
            "a value is missing: give --trainer.loggers.directory VALUE",
        ),
    ],
)
def test_a_wrong_argument_of_the_trainer_is_one_message(here, line, message):
    with pytest.raises(ConfigError) as caught:
        settings(f"{line} --trainer.progress_bar false").trainer()
    assert message in str(caught.value)
    assert ".help" not in str(caught.value)


def test_what_is_printed_is_what_was_given_and_reads_back_as_the_same(drive, here):
    line = (
        f"{FIT} --task.hidden 16 --task.rate 1 --data.count 4 --trainer.checkpoint.every 10"
        " --trainer.callbacks drivetrain.EarlyStopping --trainer.callbacks.patience 3"
        " --trainer.validate_every none"
        " --resume auto --print-config"
    )
    code, out, _ = drive("fit", line)
    assert code == 0
    assert yaml.safe_load(out) == {
        "task": {"class_path": "shapes.Shapes", "init_args": {"hidden": 16, "rate": 1.0}},
        "data": {"class_path": "shapes.Data", "init_args": {"count": 4}},
        "trainer": {
            "max_epochs": 2,
            "validate_every": None,
            "progress_bar": False,
            "strategy": "cpu",
            "loggers": [],
            "checkpoint": {"every": 10},
            "callbacks": [{"class_path": "drivetrain.EarlyStopping", "init_args": {"patience": 3}}],
        },
        "resume": "auto",
    }
    (here / "config.yaml").write_text(out, encoding="utf-8")
    assert drive("fit", "--config config.yaml --print-config")[1] == out


def test_several_policies_are_a_list_in_a_file(drive, here):
    given = {"checkpoint": [{"every": "3 steps", "best": 0}, {"best": 2, "by": "train/loss"}]}
    (here / "config.json").write_text(json.dumps({"trainer": given}), encoding="utf-8")
    first, second = settings("--config config.json --trainer.max_epochs 1").trainer().checkpoint
    assert (str(first.every), first.best, second.best, second.by) == ("3 steps", 0, 2, "train/loss")
    printed = drive("fit", f"{FIT} --config config.json --print-config")[1]
    assert yaml.safe_load(printed)["trainer"]["checkpoint"] == given["checkpoint"]


JSON = {
    "task": "shapes.Shapes",
    "data": {"class_path": "shapes.Data", "init_args": {"count": 4}},
    "trainer": {
        "max_epochs": 3,
        "strategy": {"name": "ddp", "bucket_mb": 50},
        "devices": 1,
        "checkpoint": {"every": "6 steps", "best": 0},
        "callbacks": [
            "drivetrain.LossSpike",
            {"class_path": "drivetrain.EarlyStopping", "init_args": {"patience": 2}},
        ],
    },
}
YAML = """
task: {class_path: shapes.Shapes, init_args: {rate: 1e-2}}
data:
  class_path: shapes.Data
  init_args:
    count: 4
trainer:
  max_epochs: 3
  checkpoint:
    every: 6 steps
    best: 0
  callbacks:
  - class_path: drivetrain.EarlyStopping
    init_args: {patience: 2}
"""


@pytest.mark.parametrize(
    "content", [json.dumps(JSON), json.dumps(JSON, indent="\t"), YAML], ids=["json", "tabs", "yaml"]
)
def test_a_file_configures_a_run_and_the_line_overrides_it(drive, here, content):
    (here / "config").write_text(content, encoding="utf-8")
    plan = json.loads(drive("plan", "--config config --json")[1])
    assert (plan["updates"], plan["saving"]["first"], plan["saving"]["times"]) == (12, 6, 2)
    plan = json.loads(drive("plan", "--config config --json --trainer.max_epochs 1 --data.count 5")[1])
    assert plan["updates"] == 5
    callbacks = (
        settings("--config config --trainer.callbacks+=drivetrain.LearningRateMonitor").trainer().callbacks
    )
    assert [type(each).__name__ for each in callbacks][-2:] == ["EarlyStopping", "LearningRateMonitor"]
    assert callbacks[-2].patience == 2


def test_every_object_of_a_line_may_have_arguments(here):
    line = "--task shapes.Shapes --train-data shapes.make_data --train-data.count 3"
    assert settings(line).make("train_data").count == 3
    assert yaml.safe_load(settings(line).as_file())["train_data"]["init_args"] == {"count": 3}


def test_what_replaces_an_object_of_the_file_comes_without_its_arguments(here):
    (here / "config.json").write_text(json.dumps(JSON), encoding="utf-8")
    line = "--config config.json --data shapes.make_data --trainer.strategy cpu --trainer.checkpoint false"
    assert yaml.safe_load(settings(line).as_file())["data"] == "shapes.make_data"
    trainer = yaml.safe_load(settings(line).as_file())["trainer"]
    assert (trainer["strategy"], trainer["checkpoint"]) == ("cpu", False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid YAML or JSON"),
        ("a: [", "not valid YAML or JSON"),
        ("[]", "must be a mapping"),
        ('{"trianer": {}}', "Did you mean 'trainer'?"),
        ('{"trainer": 3}', "trainer must be a mapping"),
        ('{"task": {"objekt": "a.B"}}', "unknown name 'objekt'"),
        ('{"task": 3}', "task must be a mapping, not 3"),
        ('{"resume": 3}', "resume must be a text"),
        ("trainer: {max_epoch: 3}", "Did you mean 'max_epochs'?"),
        ("trainer: {checkpoint: {evry: 3}}", "Did you mean 'every'?"),
        ("trainer: {checkpoint: [{every: 3, best: 0}, {evry: 3}]}", "Did you mean 'every'?"),
        ("trainer: {max_epochs: three}", "--trainer.max_epochs must be a number or none, not 'three'"),
        ("trainer: {seed: 1, seed: 2}", "'seed' is given twice"),
        ('{"trainer": {"seed": 1, "seed": 2}}', "'seed' is given twice"),
        ("task: {class_path: shapes.Shapes, init_args: {hiden: 3}}", "Did you mean 'hidden'?"),
        ("task: !!python/object/apply:os.mkdir [made]", "could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(here, content, message):
    path = here / "config.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        settings("--config config.yaml")
    assert message in str(caught.value)
    assert "config.yaml" in str(caught.value)
    assert not (here / "made").exists()


def test_one_file_is_read_and_two_are_refused(here):
    with pytest.raises(ConfigError, match="--config is given 2 times"):
        settings("--config a.yaml --config b.yaml")


def test_help_lists_every_argument_with_its_text_and_default(drive, write):
    write("typed.py", f"from pathlib import Path\n{TYPED}")
    code, out, _ = drive("fit", "--task typed.Typed --trainer.strategy ddp --help", quiet=False)
    text = " ".join(out.split())
    assert code == 0
    assert "--task.whole WHOLE A whole number, of 100 % or less. (type: int, default: 0)" in text
    assert "--trainer.max_grad_norm MAX_GRAD_NORM Clip the gradient's global norm to this;" in text
    assert "(type: float | null, default: null)" in text
    assert "--trainer.strategy.bucket_mb" in text
    assert "--trainer.checkpoint.keep_last" in text
    assert all(f"--trainer.{each}" in text for each in settings(QUIET).trainer().to_json())
