"""`hang_timeout` ends a run in which nothing moves, names the rank that is behind, and ends no sound run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.failing import Ended
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

import drivetrain
from drivetrain import Callback, CheckpointConfig, TaskModule, Trainer
from drivetrain.checkpoint.saving.background import Background
from drivetrain.checkpoint.storage import filesystem
from drivetrain.distributed.failure import messages as failure_wire
from drivetrain.distributed.failure.channel import FailureChannel
from drivetrain.distributed.failure.messages import TIMING
from drivetrain.distributed.failure.silence import machine
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

PATHS = os.pathsep.join(map(str, (Path(__file__).parents[3], Path(drivetrain.__file__).parents[1])))
"""Where the programs find the tests' tasks, and this very package."""

PROGRAM = """
import time
import torch
from tests.support.tasks import Regression, pairs
from drivetrain import Callback, CheckpointConfig, Trainer
from drivetrain.distributed.failure import messages as failure_wire

failure_wire.TIMING = failure_wire.TIMING.scaled(0.3)

def act(here):
    rank = torch.distributed.get_rank()
    if here == "WHERE" and rank == SIZE - 1:
        ACT

class Task(Regression):
    steps = 0

    def forward(self, features):
        self.steps += 1
        if self.steps == 3:
            act("forward")
        return super().forward(features)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40 * SIZE

    def __getitem__(self, index):
        if index >= 24:
            act("dataset")
        return torch.ones(4), torch.ones(1)

class Acts(Callback):
    def on_step_end(self, run):
        if run.progress.updates == 3:
            act("step")

    def on_evaluation_end(self, run):
        act("evaluation")

data = torch.utils.data.DataLoader(Rows(), batch_size=4) if "WHERE" == "dataset" else None
Trainer(
    strategy="STRATEGY", devices=SIZE, max_epochs=1, callbacks=[Acts()], run_dir="run", loggers=(),
    progress_bar=False, checkpoint=CheckpointConfig(every="2 steps", by=None), hang_timeout=2.0,
).fit(Task(), data or pairs(40 * SIZE, num_workers=WORKERS), pairs(8))
"""

SLEEPS = "time.sleep(1000)"
RAISES = "raise ValueError('boom')"


def program(strategy: str, size: int, where: str, act: str, workers: int = 0) -> pytest.MarkDecorator:
    """A training of which the last rank acts at a place."""
    text = PROGRAM.replace("STRATEGY", strategy).replace("SIZE", str(size)).replace("WHERE", where)
    return pytest.mark.program(text.replace("ACT", act).replace("WORKERS", str(workers)), PYTHONPATH=PATHS)


def of(strategy: str, size: int, package: str | None = None) -> object:
    """A training under a strategy, the last rank of which sleeps."""
    marks = [program(strategy, size, "step", SLEEPS)]
    if package is not None:
        marks.append(pytest.mark.full)
        if importlib.util.find_spec(package) is None:
            marks.append(pytest.mark.skip(f"needs {package}"))
    return pytest.param(size, marks=marks, id=f"{strategy} x{size}")


def stacks(ended: Ended) -> dict[str, str]:
    """The stacks of all ranks, from where the last lines say that they are."""
    told = next(each for each in ended.errors if "the stacks of all ranks are in " in each)
    directory = Path(told.partition("the stacks of all ranks are in ")[2])
    assert directory.parent.name == "failures"
    return {each.name: each.read_text(encoding="utf-8") for each in directory.iterdir()}


@pytest.mark.parametrize(
    "size", [of("ddp", 3), of("fsdp", 2), of("zero2", 2, "deepspeed"), of("accelerate", 2, "accelerate")]
)
def test_a_rank_that_sleeps_for_ever_ends_all_and_is_named(ended: Ended, size: int) -> None:
    assert ended.code == 75, ended.errors
    others = "ranks 0 and 1 wait" if size == 3 else "rank 0 waits"
    assert re.fullmatch(
        rf"drivetrain: no progress for 2 s; rank {size - 1} is behind, in training, after update 3, in"
        rf" on_step_end of Acts; {others} in \w+ \(program.py:\d+\), in training, after update 3, in the"
        r" (forward|backward|step)",
        ended.errors[-1],
    ), ended.errors[-1]
    found = stacks(ended)
    assert sorted(found) == [f"rank{rank}.txt" for rank in range(size)]
    assert "in on_step_end" in found[f"rank{size - 1}.txt"]
    assert all("in train_step" in each for each in found.values()), "the main threads are there"


@program("ddp", 2, "dataset", SLEEPS)
def test_a_rank_whose_data_does_not_come_is_named_with_the_batch(ended: Ended) -> None:
    assert ended.code == 75, ended.errors
    assert re.search(
        r"rank 1 is behind, in training, after update \d+, waiting for batch \d+ of epoch 0 .*__getitem__"
        r".*; rank 0 waits in backward",
        ended.errors[-1],
    ), ended.errors[-1]


@program("ddp", 2, "evaluation", RAISES)
def test_the_hook_in_which_a_rank_fails_is_in_the_last_line(ended: Ended) -> None:
    assert ended.code == 1
    place = "in validation, batch 1, after update 20, in on_evaluation_end of Acts"
    assert ended.errors[-1].endswith(f"RankFailure: rank 1 failed first, {place}: ValueError: boom")
    assert "ValueError: boom" in stacks(ended)["rank1.txt"], "with its traceback"


@program("ddp", 2, "step", "import os; os.abort()")
def test_a_rank_that_aborts_leaves_where_it_was(ended: Ended) -> None:
    """As gloo does where ranks make different collectives: no Python code runs any more."""
    assert ended.code == 1
    assert any("program.py" in each and "in on_step_end" in each for each in ended.errors)
    assert re.search(
        r"rank 1 failed first.*: it was killed by SIGABRT; its own messages are above; rank 0 was in"
        r" training, after update 3, in the backward$",
        ended.errors[-1],
    ), ended.errors[-1]


@program("ddp", 2, "forward", RAISES, workers=1)
def test_the_part_of_the_step_is_named_and_the_stacks_of_a_loaders_workers_are_there(ended: Ended) -> None:
    place = "in training, after update 2, in the forward"
    assert ended.errors[-1].endswith(f"RankFailure: rank 1 failed first, {place}: ValueError: boom")
    if machine() is not None:  # where a process can be made to write its stacks
        for text in stacks(ended).values():
            assert "/data/_utils/worker.py" in text.partition("\nThe worker process ")[2], text


# What follows runs in copies of this process: one that is ended would be an error.


def quickly() -> None:
    """Let the channel look ten times as often."""
    failure_wire.TIMING = TIMING.scaled(0.1)


def test_the_limit_is_ten_minutes_by_default() -> None:
    assert Trainer(max_steps=1).hang_timeout == 600.0
    assert Trainer(max_steps=1, hang_timeout=None).hang_timeout is None


def waits_for_its_save() -> str:
    rank = torch.distributed.get_rank()
    with FailureChannel(rank, 2, timing=TIMING.scaled(0.1), progress=lambda: 0, hang_timeout=0.4):
        behind = Background()
        if rank == 0:
            behind.start(lambda: time.sleep(1.2))  # stands for the removal of an old checkpoint
        behind.wait()
        torch.distributed.barrier()
    return "fine"


def test_a_rank_that_waits_for_its_save_in_the_background_is_no_hang() -> None:
    assert run_distributed(waits_for_its_save) == ["fine", "fine"]


def removes_slowly(directory: str) -> int:
    quickly()
    remove = shutil.rmtree

    def slowly(path: Any, *arguments: Any, **options: Any) -> None:
        if ".removing" in str(path):
            time.sleep(1.2)
        remove(path, *arguments, **options)

    filesystem.shutil.rmtree = slowly  # type: ignore[assignment]
    policy = CheckpointConfig(every="2 steps", keep_last=1, by=None, asynchronous=True)
    trainer = quiet(
        max_steps=4,
        strategy=DDP(world_size=2),
        devices=2,
        run_dir=directory,
        checkpoint=policy,
        hang_timeout=0.6,
    )
    return trainer.fit(Regression(), pairs()).progress.updates


def test_a_slow_removal_of_a_checkpoint_ends_no_training(tmp_path: Path) -> None:
    assert run_distributed(removes_slowly, str(tmp_path)) == [4, 4]
    assert (tmp_path / "model.safetensors").exists()


class WaitsForSignal(Callback):
    """A wait that only a signal's handler ends."""

    def on_step_end(self, run: Any) -> None:
        """Wait."""
        if run.progress.updates == 2 and run.engine.ranks.rank == 1:
            event = threading.Event()
            signal.signal(signal.SIGALRM, lambda *_: event.set())
            signal.setitimer(signal.ITIMER_REAL, 0.8)
            event.wait()


def interrupted_waits() -> int:
    quickly()
    options: dict[str, Any] = {"strategy": DDP(world_size=2), "devices": 2, "callbacks": [WaitsForSignal()]}
    return quiet(max_steps=4, **options).fit(Regression(), pairs()).progress.updates


def test_a_wait_that_a_signal_ends_is_no_hang() -> None:
    assert run_distributed(interrupted_waits) == [4, 4]


def alone(function: Any, *arguments: Any) -> Any:
    """What a function returns in a copy of this process."""
    return run_distributed(function, *arguments, world_size=1)[0]


def compiles_slowly() -> int:
    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(1.2)
        return graph.forward

    class Compiled(TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.net.forward = torch.compile(self.net.forward, backend=backend)  # type: ignore[method-assign]

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x)
            return found

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.square().mean()

    trainer = quiet(max_steps=2, hang_timeout=0.6)
    return trainer.fit(Compiled(), [{"x": torch.ones(2, 4)}] * 4).progress.updates


@pytest.mark.filterwarnings("ignore")
def test_a_long_compilation_is_no_hang() -> None:
    assert alone(compiles_slowly) == 2


def has_a_slow_body() -> int:
    updates = []
    for step in quiet(max_steps=2, hang_timeout=0.4).steps(Regression(), pairs()):
        time.sleep(0.8)
        updates.append(step.update)
    return len(updates)


def test_the_body_of_a_loop_may_take_any_time() -> None:
    assert alone(has_a_slow_body) == 2


class Busy(Callback):
    """A hook that takes longer than the limit, in which something moves."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_fit_end(self, run: Any) -> None:
        """Report progress, or have another run make some."""
        if self.how == "reports":
            for _ in range(6):
                time.sleep(0.2)
                run.report_progress()
        else:

            class Slow(Regression):
                def validation_step(self, batch: Any) -> Any:
                    time.sleep(0.2)
                    return super().validation_step(batch)

            quiet(hang_timeout=None).validate(Slow(), pairs(24))


def acts_in_a_hook(how: str) -> int:
    trainer = quiet(max_steps=2, hang_timeout=0.6, callbacks=[Busy(how)])
    return trainer.fit(Regression(), pairs()).progress.updates


@pytest.mark.parametrize("how", ["reports", "validates"])
def test_a_long_hook_in_which_something_moves_is_no_hang(how: str) -> None:
    assert alone(acts_in_a_hook, how) == 2
