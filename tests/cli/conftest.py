"""A directory with a user's modules, and the command line in this process."""

from __future__ import annotations

import sys
import textwrap

import pytest
from tests.support.messages import unconfigured

from drivetrain.cli.main import main

SHAPES = """
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import OptimizerConfig, TaskModule


class Shapes(TaskModule):
    def __init__(self, hidden: int = 8, rate: float = 0.1, kind: Literal["relu", "tanh"] = "relu", name=None):
        super().__init__()
        middle = nn.ReLU() if kind == "relu" else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(4, hidden), middle, nn.Linear(hidden, 2))
        self.rate = rate

    def forward(self, features):
        return self.net(features)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["label"])

    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=self.rate)


class Needy(Shapes):
    def __init__(self, classes: int):
        super().__init__()


def batches(count):
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 8, 4, generator=generator)
    return [{"features": each, "label": (each.sum(1) > 0).long()} for each in features]


class Data:
    def __init__(self, count: int = 5):
        self.count = count

    def train_data(self):
        return batches(self.count)

    def validation_data(self):
        return batches(3)

    def test_data(self):
        return batches(2)

    def predict_data(self):
        return batches(2)


data = Data()
ready = batches(4)


def make_data(count: int = 6):
    return Data(count)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with the module `shapes`; what was imported from it is forgotten afterwards."""
    (tmp_path / "shapes.py").write_text(SHAPES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def as_a_program(warns_as_expected):
    """Messages go to stderr, as of a command that configures no logging."""
    with unconfigured():
        yield


@pytest.fixture
def write(here):
    """Write a module into the current directory."""

    def writer(name, text):
        (here / name).write_text(textwrap.dedent(text), encoding="utf-8")

    return writer


@pytest.fixture
def drive(here, capsys):
    """Run `drivetrain` with a quiet trainer; returns the exit code, stdout and stderr."""

    def run(command, line="", *, quiet=True):
        words = [command, *line.split()]
        if quiet and command != "env":
            words += ["--trainer.progress_bar=false", "--trainer.strategy", "cpu"]
            if "--trainer.loggers" not in line:
                words += ["--trainer.loggers="]
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
