"""A worker that does not come to life, locked as it was copied, is told of and replaced."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or multiprocessing.get_start_method() != "fork", reason="workers are no copies"
)

PROGRAM = """
import os, signal, sys, warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from drivetrain import LambdaCallback, OptimizerConfig, TaskModule, Trainer
from drivetrain.data import worker_starts

worker_starts.PATIENCE = 0.5
planted, how, options = Path("planted"), sys.argv[1], eval(sys.argv[2])


def plant():
    # Where the interpreter's own locks are taken, before a worker's first line.
    tokens = sorted(planted.iterdir())
    if tokens:
        tokens[0].unlink()
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which a locked one does not hear either
        signal.pause()


os.register_at_fork(after_in_child=plant)


class Drawn(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(4) + index / 12


class Line(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(4, 1)

    def forward(self, features):
        return self.line(features)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=0.1)


def train(workers):
    task = Line()
    loader = DataLoader(Drawn(), batch_size=2, shuffle=True, **workers)
    quiet = {"loggers": (), "checkpoint": False, "progress_bar": False, "strategy": "cpu"}
    result = Trainer(max_epochs=2, **quiet).fit(task, loader)
    return result.progress.samples, [each.tolist() for each in task.parameters()]


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = train(options)
print(found == train({}), len(caught), *(each.message for each in caught), sep="\\n")
"""


def train(how: str, times: int, **options: object) -> subprocess.CompletedProcess[str]:
    Path("planted").mkdir()
    for each in range(times):
        Path("planted", str(each)).touch()
    words = [sys.executable, "-c", PROGRAM, how, repr(options)]
    return subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("how", ["stopped", "locked"])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_are_started_anew_when_one_does_not_come_to_life(how: str, persistent_workers: bool) -> None:
    done = train(how, 1, num_workers=2, persistent_workers=persistent_workers)
    assert done.returncode == 0, done.stderr
    same, count, *texts = done.stdout.splitlines()
    assert (same, count) == ("True", "1"), done.stdout
    assert "the training data: worker 0 (pid " in texts[0]
    assert "has not come to its first line 0.5 s after it was started" in texts[0]


def test_one_that_does_not_come_to_life_again_is_an_error() -> None:
    done = train("locked", 2, num_workers=1)
    assert done.returncode == 1
    assert "DataError: the training data raised before its first batch" in done.stderr
    assert "So it was when they were started before" in done.stderr
