"""The arguments of a run from the command line and from a file; the list of strategies."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import yaml
from tests.cli.conftest import settings
from tests.cli.programs.typed import Policy
from torch.utils.data import default_collate

from drivetrain import (
    CheckpointConfig,
    DDPConfig,
    EarlyStopping,
    Float8,
    MemoryConfig,
    PreemptionConfig,
    Trainer,
)
from drivetrain.cli.references import importable_here
from drivetrain.cli.settings import Settings
from drivetrain.loggers import CSVLogger
from drivetrain.strategies.fsdp.config import FSDPConfig

FIT = "--task shapes.Shapes --data shapes.Data --trainer.max_epochs 2"
QUIET = "--trainer.loggers= --trainer.progress_bar false"


def trainer(line: str) -> Any:
    return settings(f"{QUIET} {line}").trainer()


def read(task, *lines):
    """Pairs of a line and what it or its file gives a task of `programs/typed.py`, if that is wrong."""
    wrong = []
    for line in lines:
        words = [word for text in line for word in f"--task.{text}".split(" ", 1)]
        with importable_here():
            given = Settings("fit", "train", ["--task", f"typed.{task}", *words])
        Path("config.yaml").write_text(given.as_file(), encoding="utf-8")
        for made in (given.make("task"), settings("--config config.yaml").make("task")):
            for text, value in line.items():
                found = made.given[re.split(r"[ .+=]", text)[0]]
                wrong += [] if repr(found) == repr(value) else [(text, found)]
    return wrong


def test_a_text_becomes_what_the_annotation_asks_for(typed):
    one = {
        "whole -2": -2, "number 3": 3.0, "flag yes": True, "text 3": "3", "maybe none": None,
        "either auto": "auto", "kind tanh": "tanh", "sizes 1,2,3": [1, 2, 3],
        "pair (0.9,-inf)": (0.9, -math.inf), 'options {"a":1}': {"a": 1}, "path a/b": Path("a/b"),
        "rate 1": 1.0,
    }  # fmt: skip
    two = {"number=-1e-3": -0.001, "text=": "", "sizes 3": [3], "rate inf": math.inf}
    three = {"number inf": math.inf, "sizes=": [], "text inf": "inf"}
    assert read("Typed", one, two, three) == []
    assert typed("--task.sizes+=1 --task.sizes+=2")["sizes"] == [1, 2]
    assert vars(typed("--task.policy.best 3")["policy"]) == {"every": 1, "best": 3}
    # Arguments that a constructor passes on are known with their types.
    found = settings("--task typed.Inheriting --task.extra 3 --task.whole 4").make("task")
    assert found.given["whole"] == 4


def test_a_default_tells_the_type_that_no_annotation_does_and_is_added_to(typed):
    one = {
        "kernel 5,5": (5, 5), "widths+=8": [64, 64, 8], "rates 1,inf": [1.0, math.inf],
        "names 8,true": ["8", "true"],
        "sizes.a 5": {"a": 5, "b": 2}, "by_epoch.1 4": {0: 8, 1: 4}, "title a,b": "a,b",
        "whole 0.5": 0.5, "none 5,6": [5, 6], "policy.best 3": Policy(every=5, best=3),
        "nothing.a 2": {"a": 2}, "other.b.c 1e-3": {"b": {"c": 1e-3}},
    }  # fmt: skip
    two = {
        "kernel 5": (5,),
        "widths 8": [8],
        "names [8,1.50]": ["8", "1.50"],
        'sizes {"a":5}': {"a": 5},
        "title 3": "3",
        "whole none": None,
    }
    assert read("InheritingBare", one, two) == []
    line = '--task typed.Bare --task.widths=8 --task.widths+=9 --task.sizes {"a":5} --task.sizes.c 1'
    found = settings(line).make("task").given
    assert (found["widths"], found["sizes"]) == ([8, 9], {"a": 5, "c": 1})


RUNS: tuple[dict[str, tuple[Any, str]], ...] = (
    {
        "max_epochs": (2.5, "2.5"), "max_time": (1000.0, "1e3"), "max_tokens": (10**7, "10M tokens"),
        "strategy": ("cpu", "cpu"), "devices": (1, "1"), "num_nodes": (1, "1"), "compile": (True, "true"),
        "precision": ("bf16-mixed", "bf16-mixed"), "on_bad_batch": ("skip", "skip"),
        "memory": (MemoryConfig(activation_checkpointing=True), '{"activation_checkpointing":true}'),
        "seed": (3, "3"), "data_seed": (None, "none"),
        "gradient_accumulation_steps": ({0: 8, "4 epochs": 4}, '{0: 8, "4 epochs": 4}'),
        "batch_size": (8, "8"), "max_grad_norm": (1e-3, "1e-3"), "limit_train_batches": (0.5, "0.5"),
        "validate_every": ("500 steps", "500 steps"),
        "sanity_validation": (3, "3"), "checkpoint": ("async", "async"), "assets": (("a.txt",), "a.txt"),
        "run_name": ("1e3", "1e3"), "loggers": (("tensorboard", "csv", "jsonl"), "+=jsonl"),
        "log_every": (None, "none"), "progress_bar": ("tqdm", "tqdm"), "hang_timeout": (None, "None"),
        "preemption": (PreemptionConfig(requeue=("USR1",)), '{"requeue": "USR1,"}'),
    },
    {
        "max_steps": (10, "10"), "min_steps": (2, "2"), "dry_run": ("batches", "batches"),
        "strategy": ("cpu", "cpu"), "on_save_error": ("warn", "warn"),
        "deterministic": (True, "yes"), "max_grad_value": (0.5, ".5"), "micro_batch": ("auto", "auto"),
        "num_workers": (2, "2"), "collate": (default_collate, "torch.utils.data.default_collate"),
        "group_by_length": ("a,b", "a,b"), "validate_every": (7, "7"),
        "validate_from": ("2 epochs", "2 epochs"),
        "evaluation_batch_size": (4, "4"), "limit_validation_batches": (3, "3"),
        "limit_test_batches": (3, "3"), "limit_predict_batches": (0.1, "0.1"),
        "checkpoint": (CheckpointConfig(every=4, best=0), '{"every":4,"best":0}'),
        "run_dir": ("a,b", "a,b"), "loggers": ((), "none"), "log_first_step": (True, "true"),
        "train_metrics": (False, "false"),
        "callbacks": ([EarlyStopping("validation/loss")], "drivetrain.EarlyStopping"),
        "on_nonfinite": ("skip", "skip"),
    },
)  # fmt: skip


def test_python_the_line_and_the_printed_file_make_the_same_trainer(here):
    assert {*RUNS[0], *RUNS[1]} == {each.name for each in dataclasses.fields(Trainer)}
    (here / "a.txt").touch()
    for run in RUNS:
        python = Trainer(**{name: value for name, (value, _) in run.items()}).to_json()
        texts = {name: text if text.startswith("+=") else f"={text}" for name, (_, text) in run.items()}
        words = [f"--trainer.{name}{text}" for name, text in texts.items()]
        given = Settings("fit", "train", words)
        Path("given.yaml").write_text(given.as_file(), encoding="utf-8")
        Path("record.json").write_text(json.dumps({"trainer": python}), encoding="utf-8")
        files = [settings(f"--config {name}") for name in ("given.yaml", "record.json")]
        for found in (given, *files):
            assert found.trainer().to_json() == python
        assert files[0].as_file() == given.as_file()


def test_spellings_homes_and_functions(here, monkeypatch):
    found = trainer("--trainer.max-epochs 3 --trainer.seed 1 --trainer.seed=2")
    assert (found.max_epochs, found.seed) == (3, 2)
    monkeypatch.setenv("HOME", str(here))
    (here / "a.yaml").write_text("trainer: {run_dir: ~/a, assets: [~/b]}", encoding="utf-8")
    found = settings("--config ~/a.yaml --resume=~/c --task.name=~d --task shapes.Shapes")
    expected = [f"{here}/a", [f"{here}/b"], f"{here}/c"]
    assert [*found._section("trainer").values(), found.option("resume")] == expected
    line = "--task shapes.Shapes --train-data shapes.make_data --train-data.count 3"
    assert settings(line).make("train_data").count == 3


def test_parts_make_the_configurations_of_the_trainer(here, monkeypatch):
    found = trainer(
        "--trainer.strategy ddp --trainer.strategy.bucket_mb 50 --trainer.checkpoint.every 5"
        " --trainer.checkpoint.best 0 --trainer.validate_every 7 --trainer.preemption.requeue USR1,USR2"
    )
    assert found.strategy == DDPConfig(bucket_mb=50.0)
    assert (str(found.checkpoint.every), str(found.validate_every)) == ("5 steps", "7 steps")
    assert list(found.preemption.requeue) == ["SIGUSR1", "SIGUSR2"]
    monkeypatch.setattr("drivetrain.integrations.torchao.float8.is_installed", lambda package: True)
    line = (
        f"{QUIET} --trainer.strategy cpu --trainer.precision fp8 --trainer.precision.emulate yes"
        " --trainer.precision.recipe rowwise --trainer.precision.leave_out lm_head,*.router"
    )
    expected = Float8(recipe="rowwise", leave_out=("lm_head", "*.router"), emulate=True)
    assert settings(line).trainer().precision == expected
    Path("config.yaml").write_text(settings(line).as_file(), encoding="utf-8")
    assert settings("--config config.yaml").trainer().precision == expected


def test_callbacks_and_loggers_are_made_from_class_paths(typed):
    found = settings(
        "--trainer.callbacks+=drivetrain.EarlyStopping --trainer.callbacks.patience 3"
        " --trainer.callbacks+=typed.Loud --trainer.loggers+=drivetrain.CSVLogger"
        " --trainer.loggers.directory logs --trainer.progress_bar false"
    ).trainer()
    stopping, loud = found.callbacks
    assert (type(stopping), stopping.patience, type(loud).__name__) == (EarlyStopping, 3, "Loud")
    assert found.loggers[:2] == ["tensorboard", "csv"]  # += adds to the default
    assert isinstance(found.loggers[2], CSVLogger)


def test_print_config_is_what_was_given_and_reads_back_as_the_same(drive, here):
    line = (
        f"{FIT} --task.hidden 16 --task.rate 1 --data.count 4 --trainer.checkpoint.every 10"
        " --trainer.callbacks drivetrain.EarlyStopping --trainer.callbacks.patience 3"
        " --trainer.validate_every none --resume auto --print-config"
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
    printed = yaml.safe_load(drive("predict", f"{FIT} --joined --metrics --print-config")[1])
    assert (printed["joined"], printed["metrics"]) == (True, True)
    (here / "config.yaml").write_text(out, encoding="utf-8")
    assert drive("fit", "--config config.yaml --print-config")[1] == out
    given = {"checkpoint": [{"every": "3 steps", "best": 0}, {"best": 2, "by": "train/loss"}]}
    (here / "config.json").write_text(json.dumps({"trainer": given}), encoding="utf-8")
    first, second = settings("--config config.json --trainer.max_epochs 1").trainer().checkpoint
    assert (str(first.every), first.best, second.best, second.by) == ("3 steps", 0, 2, "train/loss")


CONFIG = """
task: shapes.Shapes
data: {class_path: shapes.Data, init_args: {count: 4}}
trainer:
  max_epochs: 3
  strategy: {name: ddp, bucket_mb: 50}
  devices: 1
  checkpoint: {every: 6 steps, best: 0}
  callbacks: [drivetrain.LossSpike, {class_path: drivetrain.EarlyStopping, init_args: {patience: 2}}]
"""


def test_a_file_configures_a_run_and_the_line_overrides_it(drive, here):
    (here / "config").write_text(CONFIG, encoding="utf-8")
    plan = json.loads(drive("plan", "--config config --json")[1])
    assert (plan["steps"], plan["saving"]["first"], plan["saving"]["times"]) == (12, 6, 2)
    plan = json.loads(drive("plan", "--config config --json --trainer.max_epochs 1 --data.count 5")[1])
    assert plan["steps"] == 5
    line = "--config config --trainer.callbacks+=drivetrain.LearningRateMonitor"
    found = settings(line).trainer().callbacks
    assert [type(each).__name__ for each in found][-2:] == ["EarlyStopping", "LearningRateMonitor"]
    assert found[-2].patience == 2


def test_variables_and_merged_names_set_arguments(drive, here, monkeypatch):
    base = ".base: &base {every: 6 steps, best: 0}\n"
    text = base + "trainer: {max_epochs: 3, checkpoint: {<<: *base, every: 2}}"
    (here / "a.yaml").write_text(text, encoding="utf-8")
    (here / "big.py").write_text("class Data:\n def __init__(self, dModel=1, N=2): 0", encoding="utf-8")
    for name, value in {
        "CONFIG": "a.yaml",
        "TASK": "shapes.Shapes",
        "TASK__HIDDEN": "5",
        "TRAINER__MAX_EPOCHS": "4",
        "TRAINER__CALLBACKS": "drivetrain.EarlyStopping",
        "TRAINER__CALLBACKS__PATIENCE": "7",
        "DATA": "big.Data",
        "DATA__dModel": "7",
        "PRINT_CONFIG": "true",
    }.items():
        monkeypatch.setenv(f"DRIVETRAIN_FIT__{name}", value)
    code, out, err = drive("fit", "--trainer.max_steps 8 --task.hidden=6", quiet=False)
    assert code == 0, err
    found = yaml.safe_load(out)
    assert found["task"]["init_args"] == {"hidden": 6}  # the line wins
    assert found["data"]["init_args"] == {"dModel": 7}
    assert found["trainer"].pop("callbacks")[0]["init_args"] == {"patience": 7}
    assert found["trainer"] == {"max_epochs": 4, "checkpoint": {"every": 2, "best": 0}, "max_steps": 8}
    for name, nearest in {"DRIVETRAIN_FIT__DATA__N": "N", "DRIVETRAIN_FIT__TRAINER__SED": "seed"}.items():
        monkeypatch.setenv(name, "1")
        code, _, err = drive("fit", quiet=False)
        assert (code, f"Did you mean '{nearest}'?" in err, name in err) == (2, True, True)
        monkeypatch.delenv(name)


def test_help_lists_every_argument_with_its_text_and_default(drive, typed):
    code, out, _ = drive("fit", "--task typed.Typed --trainer.strategy ddp --help all", quiet=False)
    text = " ".join(out.split())
    assert code == 0
    names = ("strategy.bucket_mb", "checkpoint.keep_last", *trainer("").to_json())
    whole = "--task.whole WHOLE A whole number, of 100 % or less. (type: int, default: 0)"
    assert [each for each in (whole, *(f"--trainer.{name}" for name in names)) if each not in text] == []
    groups = ("length", "where it runs", "numbers", "gradient", "data", "evaluation", "records", "safety")
    places = [text.index(f"arguments of Trainer: {each}: --trainer.") for each in groups]
    assert places == sorted(places)
    assert "arguments of Trainer: --trainer." not in text  # none is outside of a group
    assert 'another package\'s name. Example: strategy="fsdp". (type: ' in text  # one default


def test_options_of_a_strategy_make_its_configuration(here):
    for line, expected in {
        "cpu": "cpu",
        "ddp --trainer.strategy.bucket_mb=50": DDPConfig(bucket_mb=50.0),
        "ddp --trainer.strategy.static-graph yes": DDPConfig(static_graph=True),
    }.items():
        assert trainer(f"--trainer.strategy {line}").strategy == expected
    for given, line, expected in (
        ({"name": "ddp", "bucket_mb": 3}, ".static_graph true", DDPConfig(bucket_mb=3, static_graph=True)),
        ({"name": "ddp", "bucket_mb": 3}, " ddp", DDPConfig(bucket_mb=3)),
        ({"name": "ddp", "bucket_mb": 3}, " cpu", "cpu"),  # options of another strategy go with it
        ({"name": "fsdp", "ignored": ["head", "norm.*"]}, "", FSDPConfig(ignored=("head", "norm.*"))),
    ):
        Path("config.json").write_text(json.dumps({"trainer": {"strategy": given}}), encoding="utf-8")
        line = line and f"--trainer.strategy{line}"
        assert trainer(f"--config config.json --trainer.devices 2 {line}").strategy == expected
