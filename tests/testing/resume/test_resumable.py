"""What a checkpoint does not hold is found by killing a run and going on, wherever it is kept."""

import importlib
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, TaskModule, Trainer
from drivetrain.core.errors import ConfigError
from drivetrain.testing import assert_resumable
from drivetrain.testing.resume import report
from drivetrain.testing.resume.check import ProgramError

RNG = random.Random(7)

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

    assert_resumable(make, updates=7, save_after=3, epoch=3)  # an epoch ends within the updates
    assert sorted(run_dir.rglob("*")) == before
    assert not own.exists()


class Scratch(Callback):  # fills each of its places before it is read, in whatever update a run begins
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
        self.is_large = run.progress.updates % 3 == 2
        self.losses.append(run.result.loss)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.own = 1.0

    def factor(self) -> float | Tensor:
        self.own += 0.1
        return self.own


@pytest.mark.heavy("two ranks, each of which is started three times")
def test_several_processes_are_compared_rank_by_rank() -> None:
    def forgetful() -> Fit:
        return trainer(strategy="ddp", devices=2), Counting(), loader()

    with pytest.raises(AssertionError, match=r"on rank 0: loss of micro-batch 0(.|\n)*not saved: task\.own"):
        assert_resumable(forgetful, world_size=2, updates=4)


class Recurrent(nn.Module):  # continues from the state that the batch before has left
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        out, (h, c) = self.lstm(x, self.hidden)
        self.hidden = h.detach(), c.detach()
        return out


def counted() -> Any:
    calls = [0]

    def fraction(*_: Any) -> float:
        calls[0] += 1
        return 1 / calls[0]

    return fraction


class Forgetting(Counting):  # keeps what a step depends on in every place that no checkpoint has
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(2), persistent=False)
        self.encoder = Recurrent()
        self.recent: list[float] = []
        fraction = counted()
        self.net.register_forward_hook(lambda module, inputs, outputs: outputs * fraction())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.encoder(x))

    def factor(self) -> float | Tensor:
        Forgetting.calls += 1
        self.recent = [*self.recent[-3:], len(self.recent)]
        self.mean = self.mean * 1.1
        return super().factor() * RNG.random() * Forgetting.calls * self.mean.sum() * (1 + sum(self.recent))

    def loss(self, outputs: Tensor, batch: Any, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)  # in a default, which lasts for as long as the function
        return super().loss(outputs, batch) * len(seen)

    def configure_optimizers(self) -> Any:
        def make(parameters: Any) -> Any:
            optimizer = torch.optim.SGD(parameters, lr=1e-9)  # the factors are large
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, counted())

        return make


class Counts(Callback):  # counts updates and evaluations, keeps the best, and has none of it saved
    def __init__(self) -> None:
        self.seen = self.evaluations = 0
        self.best: float | None = None

    def on_step_end(self, run: Any) -> None:
        self.seen += 1

    def on_evaluation_end(self, run: Any) -> None:
        self.evaluations += 1
        self.best = run.metrics["validation/loss"]
        run.log("evaluations", self.evaluations)


class Numbered(Sums):  # counts what it is asked for
    def __init__(self) -> None:
        self.asked = 0

    def noise(self) -> float:
        self.asked += 1
        return self.asked


def test_what_nobody_saves_is_named_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_CANDIDATES", 100)  # the processes are copies of this one

    def make() -> Any:
        chosen = trainer(callbacks=[Counts()], validate_every="2 steps")
        return chosen, Forgetting(), loader(Numbered()), loader()

    with pytest.raises(AssertionError) as caught:
        assert_resumable(make, updates=6, save_after=3)
    text = str(caught.value)
    named = (
        "resumed at update 3: the run differs from the uninterrupted one",
        r"data samples of micro-batch 0: samples that the uninterrupted run never read",
        r"not saved: buffer mean: (.|\n)*persistent=False",
        r"test_resumable\.RNG: as in a new process, expected random\.Random",
        r"Forgetting\.calls: 0, expected 7",
        r"task\.encoder\.hidden\[0\]: nothing, expected norm",
        r"task\.recent: list of 0: \[\], expected list of 4",
        r"Forgetting\.loss's default seen: list of 0: \[\], expected list of 7",
        r"net's forward hook 0 with fraction with calls: list of 1: \[0\], expected list of 1: \[7\]",
        r"scheduler\[0\] with calls: list of 1",
        r"callback Counts\.seen: 0, expected 3",
        r"callback Counts\.evaluations: 0, expected 1",
        r"callback Counts\.best: None, expected",
        r"train data\.dataset\.asked: 0, expected 12",
    )
    assert not [each for each in named if not re.search(each, text)], text


def test_a_callbacks_attribute_is_named_also_where_nothing_depends_on_it_yet() -> None:
    def make() -> Fit:
        trainer(max_steps=2).fit(
            Net(), loader()
        )  # the fit that is returned is checked, and not one before it
        return trainer(callbacks=[Counts()]), Net(), loader()

    with pytest.raises(
        AssertionError, match=r"computed values agree so far(.|\n)*Counts\.seen: 0, expected 5"
    ):
        assert_resumable(make)
    assert_resumable(make, ignore=["callback Counts.*"])


MODULES = {
    "begins": """
from tests.testing.resume.test_resumable import Net, loader, trainer

class Helped(Net):
    def factor(self):
        from helps import own
        return own.random()

def make():
    return trainer(), Helped(), loader()
""",
    "helps": "import random\nown = random.Random(3)",
}


def test_modules_that_the_fit_imports_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    begins = importlib.import_module("begins")
    try:
        importlib.import_module("helps")
        with pytest.raises(AssertionError, match=r"not saved: helps\.own: as in a new process"):
            assert_resumable(begins.make, updates=6, save_after=3)
    finally:
        for name in MODULES:
            sys.modules.pop(name)


class Chaotic(Net):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random()

    def factor(self) -> float:
        return self.own.random()


def test_a_run_that_is_never_the_same_is_told_from_one_that_forgets() -> None:
    with pytest.raises(AssertionError, match="two runs from the start already differ") as caught:
        assert_resumable(lambda: (trainer(), Chaotic(), loader()))
    assert "state that differed before: task.own: random.Random at" in str(caught.value)
    assert "after update 1: loss of micro-batch 0" in str(caught.value)


def test_what_cannot_be_checked_says_why() -> None:
    def make() -> Fit:
        return trainer(max_steps=3), Net(), loader()

    def broken() -> Fit:
        raise RuntimeError("no data today")

    with pytest.raises(ConfigError, match=r"made 3 updates, too few to continue after a resume at update 5"):
        assert_resumable(make, save_after=5)
    with pytest.raises(ConfigError, match=r"save_after=9 of 5 updates"):
        assert_resumable(make, updates=5, save_after=9)
    with pytest.raises(ProgramError, match=r"the uninterrupted run failed(.|\n)*no data today"):
        assert_resumable(broken)


PROGRAM = """
import random
import sys

from drivetrain import Trainer
from tests.testing.resume.test_resumable import Counting, loader

chance = random.Random(int(sys.argv[1]))
settings = {"strategy": "cpu", "loggers": (), "run_dir": "run"}
Trainer(max_steps=3, **settings).fit(Counting(), loader())
for step in Trainer(max_epochs=3, **settings).steps(Counting(), loader(), resume="auto"):
    chance.random()
sys.exit("so short a training is not good enough")
"""


@pytest.mark.nightly
def test_a_program_is_checked_as_it_is_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    command = ["-m", "drivetrain", "check-resume", "--updates", "6", "--fit", "2", "train.py", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=3600, env=env)
    assert done.returncode == 1, done.stderr
    # The second fit goes on from the first one's end, is saved three updates later and killed.
    assert "6 updates, killed, resumed at update 6: the run differs from the uninterrupted one" in done.stdout
    assert "first difference, after update 7: loss of micro-batch 0" in done.stdout
    assert "not saved: task.own: " in done.stdout
    assert "not saved: __main__.chance: as in a new process" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]
