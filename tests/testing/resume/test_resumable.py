"""What no checkpoint holds is found by killing a run and going on, and the report says where they differ."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, TaskModule, Trainer
from drivetrain.core.errors import ConfigError
from drivetrain.testing import assert_resumable
from drivetrain.testing.resume.check import ProgramError

Fit = tuple[Trainer, TaskModule, Any]


class Net(TaskModule):  # learns a sum; what it must not do is done by `factor`
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def factor(self) -> float | Tensor:
        return 1.0

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss: Tensor = (outputs.squeeze(1) - batch["y"]).square().mean() * self.factor()
        return loss

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01, schedule="cosine")


class Sums(Dataset[dict[str, Tensor]]):
    """Rows with noise from the global generators, which are seeded for each batch."""

    def __len__(self) -> int:
        return 16

    def noise(self) -> float:
        return random.random() + float(np.random.rand())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.tensor([1.0, 2.0, 3.0]) * index / 16
        return {"x": x + self.noise(), "y": x.sum()}


def trainer(**options: Any) -> Trainer:
    return Trainer(**{"max_epochs": 3, "strategy": "cpu", "loggers": "csv", **options})


def loader(data: Dataset[Any] | None = None) -> DataLoader[Any]:
    return DataLoader(data or Sums(), batch_size=4, shuffle=True)


class Transient(Net):  # keeps something for the length of a step, which nobody misses
    def factor(self) -> float | Tensor:
        self.last = torch.rand(2)
        self.seconds = time.perf_counter()  # and this differs between any two runs
        return 1.0


def test_a_run_that_forgets_nothing_passes_and_leaves_the_users_directories_alone(tmp_path: Path) -> None:
    run_dir, own = tmp_path / "run", tmp_path / "own"
    trainer(run_dir=run_dir, max_epochs=1).fit(Net(), loader())  # which would be in the way of a fresh start
    before = sorted(run_dir.rglob("*"))

    def make() -> Any:
        policy = CheckpointConfig(every="1 epoch", directory=own, asynchronous=True)
        chosen = trainer(run_dir=run_dir, checkpoint=policy, callbacks=[Scratch()], max_grad_norm=0.5)
        return chosen, Transient(), loader(), loader()

    assert_resumable(make, steps=7, save_after=3, epoch=3)  # an epoch ends within the steps
    assert sorted(run_dir.rglob("*")) == before
    assert not own.exists()


class Scratch(Callback):  # fills each of its places before it is read, in whatever step a run begins
    def __init__(self) -> None:
        self.device: str | None = None
        self.is_large: bool | None = None
        self.first_of_epoch = -1
        self.losses: list[float] = []
        self.began = time.time()

    def on_epoch_start(self, run: Any) -> None:
        self.first_of_epoch = run.progress.epoch

    def on_step_start(self, run: Any) -> None:
        self.losses = []

    def on_step_end(self, run: Any) -> None:
        self.device = self.device or str(run.engine.device)
        self.is_large = run.progress.steps % 3 == 2
        self.losses.append(run.result.loss)


class Counting(Net):
    own = 1.0  # of the class, which no checkpoint holds

    def factor(self) -> float | Tensor:
        Counting.own += 0.1
        return self.own


class Yielding(Counting):  # has no value "loss"
    def training_step(self, batch: Any) -> Any:
        yield "net", self.loss(self(batch["x"]), batch)

    def configure_optimizers(self) -> Any:
        return {"net": super().configure_optimizers()}


@pytest.mark.heavy("two ranks, each of which is started three times")
def test_several_processes_are_compared_rank_by_rank() -> None:
    def forgetful() -> Fit:
        return trainer(strategy="ddp", devices=2), Yielding(), loader()

    with pytest.raises(AssertionError, match="on rank 0: the net_loss of step 3: "):
        assert_resumable(forgetful, world_size=2, steps=4)


class Scaled(Net):  # its callback changes the loss
    scale = 1.0

    def factor(self) -> float | Tensor:
        return self.scale


class Scales(Callback):  # counts steps and evaluations, and has none of it saved
    def __init__(self, logs: bool = False) -> None:
        self.seen, self.logs = 0, logs

    def on_step_start(self, run: Any) -> None:
        self.seen += 1
        if self.logs:
            run.log("seen", self.seen)
        else:
            run.task.scale = self.seen


class Averaging(Net):  # in a buffer, from a number that no checkpoint holds; nothing else depends on it
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(2))

    def factor(self) -> float | Tensor:
        Averaging.calls += 1
        self.mean = torch.ones(2) * self.calls
        return 1.0


class Hidden:  # of a class that a file cannot make
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Recurrent(Net):  # continues from what the batch before has left
    def __init__(self) -> None:
        super().__init__()
        self.hidden: Hidden | None = None

    def factor(self) -> float | Tensor:
        last = torch.ones(1) if self.hidden is None else self.hidden.value
        self.hidden = Hidden(last * 1.1)
        return last.sum()


class Numbered(Sums):  # counts what it is asked for
    def __init__(self) -> None:
        self.asked = 0

    def noise(self) -> float:
        self.asked += 1
        return self.asked


class Stream(IterableDataset[dict[str, Tensor]]):  # draws its order from a generator of its own
    def __init__(self) -> None:
        self.own = random.Random(7)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from map(Sums().__getitem__, self.own.sample(range(16), 16))


def reordered() -> Fit:
    return trainer(max_epochs=None, max_steps=9), Net(), DataLoader(Stream(), batch_size=4)


Made = Callable[[], Any]

FORGETS: dict[str, tuple[Made, str]] = {
    "a counter of the task": (
        lambda: (trainer(), Counting(), loader()),
        r"step 3: the run differs(.|\n)*the loss of step 4: .*; differences after it: \d+(.|\n)*A step dep",
    ),
    "a counter of a callback that changes the loss": (
        lambda: (trainer(callbacks=[Scales()]), Scaled(), loader()),
        r"first difference: the loss of step 4: ",
    ),
    "a counter that a callback logs": (
        lambda: (trainer(callbacks=[Scales(logs=True)]), Net(), loader()),
        r"first difference: the value 'seen' of step 4: (.|\n)*computed from a variable",
    ),
    "a buffer": (
        lambda: (trainer(), Averaging(), loader()),
        r"first difference: weight or buffer 'mean' after step 6: another content",
    ),
    "an object that no file can make": (
        lambda: (trainer(), Recurrent(), loader()),
        r"the loss of step 4: (.|\n)*\nat the end: (.|\n)*\nno checkpoint can hold 'hidden' \(.*Hidden\)",
    ),
    "a counter of the data": (
        lambda: (trainer(), Net(), loader(Numbered())),
        "the samples of step 4 differ: samples that the uninterrupted run never read",
    ),
    "an order that is drawn anew": (
        reordered,
        r"the samples of step 4 differ: (.|\n)*The order of the data is drawn anew",
    ),
}


@pytest.mark.parametrize("name", FORGETS)
def test_the_first_difference_is_named_with_its_step_its_kind_and_likely_causes(name: str) -> None:
    make, text = FORGETS[name]
    with pytest.raises(AssertionError, match=text):
        assert_resumable(make, steps=6, save_after=3, epoch=2)


def test_values_and_weights_are_ignored_by_name_and_a_name_of_nothing_is_an_error() -> None:
    def make() -> Fit:
        # The fit that is returned is checked, and not one before it.
        trainer(max_steps=2).fit(Net(), loader())
        return trainer(callbacks=[Scales(logs=True)]), Averaging(), loader()

    assert_resumable(make, steps=6, ignore=["se*", "mean"])
    with pytest.raises(ConfigError, match=r"a name like ignore='callback Scales\.\*'; the nearest are '"):
        assert_resumable(make, steps=6, ignore=["mean", "callback Scales.*"])


class Chaotic(Net):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random()

    def factor(self) -> float:
        return self.own.random()


def test_a_run_that_is_never_the_same_is_told_from_one_that_forgets() -> None:
    with pytest.raises(AssertionError, match="two runs from the start already differ") as caught:
        assert_resumable(lambda: (trainer(), Chaotic(), loader()))
    assert "first difference: the loss of step 1: " in str(caught.value)
    assert "Seed every generator" in str(caught.value)


def test_what_cannot_be_checked_says_why() -> None:
    def make() -> Fit:
        return trainer(max_steps=3), Net(), loader()

    def broken() -> Fit:
        raise RuntimeError("no data today")

    with pytest.raises(ConfigError, match=r"made 3 steps, too few to continue after a resume at step 5"):
        assert_resumable(make, save_after=5)
    with pytest.raises(ConfigError, match=r"save_after=9 of 5 steps"):
        assert_resumable(make, steps=5, save_after=9)
    with pytest.raises(ProgramError, match=r"the uninterrupted run failed(.|\n)*no data today"):
        assert_resumable(broken)


PROGRAM = """
import sys

from drivetrain import Trainer
from tests.testing.resume.test_resumable import Counting, loader

assert sys.argv[1] == "1"
settings = {"strategy": "cpu", "loggers": (), "run_dir": "run"}
Trainer(max_steps=3, **settings).fit(Counting(), loader())
for result in Trainer(max_epochs=3, **settings).steps(Counting(), loader(), resume="auto"):
    pass
sys.exit("so short a training is not good enough")
"""


@pytest.mark.nightly
def test_a_program_is_checked_as_it_is_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    command = ["-m", "drivetrain", "check-resume", "--steps", "6", "--fit", "2", "train.py", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=3600, env=env)
    assert done.returncode == 1, done.stderr
    # The second fit goes on from the first one's end, is saved three steps later and killed.
    assert "6 steps, killed, resumed at step 6: the run differs from the uninterrupted one" in done.stdout
    assert "first difference: the loss of step 7: " in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]
