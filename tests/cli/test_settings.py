"""The arguments of a run from the command line and from a file; the list of strategies."""

import json
from pathlib import Path
from typing import Any

import yaml
from tests.cli.conftest import settings
from torch.utils.data import default_collate

from drivetrain import DDPConfig, EarlyStopping, Float8
from drivetrain.cli.strategies import list_strategies
from drivetrain.loggers import CSVLogger
from drivetrain.strategies import STRATEGIES, Hardware
from drivetrain.strategies.fsdp.config import FSDPConfig

FIT = "--task shapes.Shapes --data shapes.Data --trainer.max_epochs 2"
QUIET = "--trainer.loggers= --trainer.progress_bar false"


def trainer(line: str) -> Any:
    return settings(f"{QUIET} {line}").trainer()


def test_a_text_becomes_what_the_annotation_asks_for(typed):
    wrong = []
    for line, value in {
        "whole -2": -2,
        "number 3": 3.0,
        "number=-1e-3": -0.001,
        "flag yes": True,
        "text 3": "3",
        "text=": "",
        "maybe none": None,
        "either auto": "auto",
        "kind tanh": "tanh",
        "sizes 1,2,3": [1, 2, 3],
        "sizes+=1 --task.sizes+=2": [1, 2],
        "pair (0.9,0.95)": (0.9, 0.95),
        'options {"a":1}': {"a": 1},
        "path a/b": Path("a/b"),
        "rate 1": 1.0,
    }.items():
        found = typed(f"--task.{line}")[line.replace("=", " ").replace("+", " ").split()[0]]
        wrong += [] if (found, type(found)) == (value, type(value)) else [(line, found)]
    assert not wrong
    assert vars(typed("--task.policy.best 3")["policy"]) == {"every": 1, "best": 3}
    # Arguments that a constructor passes on are known with their types.
    found = settings("--task typed.Inheriting --task.extra 3 --task.whole 4").make("task")
    assert found.given["whole"] == 4


def test_spellings_functions_and_columns(here):
    found = trainer("--trainer.max-epochs 3 --trainer.seed 1 --trainer.seed=2")
    assert (found.max_epochs, found.seed) == (3, 2)
    words = f"{QUIET} --trainer.collate torch.utils.data.default_collate --trainer.group_by_length tokens"
    given = settings(f"{words} --trainer.max_epochs 2.5")
    assert given.trainer().collate is default_collate
    shown = yaml.safe_load(given.as_file())["trainer"]
    assert (shown["group_by_length"], shown["max_epochs"]) == ("tokens", 2.5)
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
    monkeypatch.setattr("drivetrain.strategies.precision.float8.is_installed", lambda package: True)
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
    assert isinstance(found.loggers[0], CSVLogger)


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


def test_help_lists_every_argument_with_its_text_and_default(drive, typed):
    code, out, _ = drive("fit", "--task typed.Typed --trainer.strategy ddp --help", quiet=False)
    text = " ".join(out.split())
    assert code == 0
    names = ("strategy.bucket_mb", "checkpoint.keep_last", *trainer("").to_json())
    whole = "--task.whole WHOLE A whole number, of 100 % or less. (type: int, default: 0)"
    assert [each for each in (whole, *(f"--trainer.{name}" for name in names)) if each not in text] == []
    groups = ("length", "where it runs", "numbers", "gradient", "data", "evaluation", "records", "safety")
    places = [text.index(f"arguments of Trainer: {each}: --trainer.") for each in groups]
    assert places == sorted(places)
    assert "arguments of Trainer: --trainer." not in text  # none is outside of a group
    assert 'see `drivetrain strategies`. Example: strategy="fsdp". (type: ' in text  # one default


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


def test_strategies_are_listed_with_their_options_and_why_they_cannot_run(drive):
    tpu = dict.fromkeys(("cuda", "mps"), "4 TPU chips") | dict.fromkeys(("single", "ddp"), "'xla'")
    for hardware, cannot in (
        (Hardware(), {"cuda": "no CUDA GPUs", "mps": "no Metal"}),
        (Hardware(cuda=8), {"mps": "8 CUDA GPUs and no Metal"}),
        (Hardware(tpu=4), {"auto": "torch_xla", **tpu}),
    ):
        found = {each.name: each for each in list_strategies(hardware)}
        assert set(found) == set(STRATEGIES)
        for name in ("auto", "single", "cpu", "cuda", "mps", "ddp"):
            assert found[name].available is (name not in cannot)
            assert cannot.get(name, "") in found[name].reason
    assert (found["ddp"].options["bucket_mb"], found["cpu"].options) == ("25.0", {})
    code, out, err = drive("strategies", quiet=False)
    assert (code, err, "  ddp " in out.partition("cannot run here")[0]) == (0, "", True)
    printed = json.loads(drive("strategies", "--json", quiet=False)[1])
    assert [each["name"] for each in printed["strategies"]] == list(STRATEGIES)
