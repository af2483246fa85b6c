"""The record of a run in `config.json`: what it ran with, and what each resume has changed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import OptimizerConfig
from drivetrain.run.record import git_state


def git(*words: str) -> None:
    settings = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", *settings, *words], check=True, capture_output=True)


def fit(steps: int, lr: float, **options: Any) -> Any:
    task = Regression(OptimizerConfig("sgd", lr=lr))
    trainer = quiet(max_steps=steps, log_every=2, loggers=("csv",), run_dir="run", checkpoint=True)
    trainer.fit(task, pairs(8), {"a": pairs(4), "b": pairs(6)}, **options)
    return json.loads(Path("run/config.json").read_text())


def test_a_run_records_what_it_ran_with_and_each_resume_what_it_changed() -> None:
    config = fit(2, 0.1)
    record = config["run"]
    assert record["git"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert all(word in record["command"] for word in sys.argv[1:2])
    assert (record["host"], record["directory"]) == (socket.gethostname(), os.getcwd())
    assert (record["strategy"], record["device"], record["world_size"]) == ("single", "cpu", 1)
    lengths = {"train": (8, 4), "validation/a": (4, 2), "validation/b": (6, 3)}
    assert {name: (each["samples"], each["batches"]) for name, each in record["data"].items()} == lengths
    assert config["optimizers"]["default"]["0 lr"] == "0.1"
    git("init", "-q")
    assert git_state(Path()) is None  # no commit
    Path("code").write_text("a")
    git("add", "code")
    git("commit", "-qm", "x")
    assert not git_state(Path())["dirty"]
    Path("code").write_text("b")
    fit(4, 0.2, resume="auto", optimizer_settings="program")
    first, second = fit(6, 0.2, resume="auto")["run"]["resumes"]
    assert (first["step"], first["optimizer_settings"], second["step"]) == (2, "program", 4)
    assert first["changed"]["optimizers.default.0 lr"] == ["0.1", "0.2"]
    assert first["changed"]["trainer.max_steps"] == [2, 4]
    assert first["changed"]["run.git.dirty"] == [None, True]
    assert second["changed"] == {"trainer.max_steps": [4, 6]}
