"""In a training under any strategy a rank that does not come back, or fails, is named with what it was doing,
and leaves the stacks of all ranks.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from tests.support.failing import Ended

import drivetrain
from drivetrain.distributed.silence import machine

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

PATHS = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(drivetrain.__file__).parents[1])))
"""Where the programs find the tests' tasks, and this very package."""

PROGRAM = """
import time
import torch
from tests.support.tasks import Regression, pairs
from drivetrain import Callback, CheckpointConfig, Trainer

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

class Acts(Callback):
    def on_step_end(self, run):
        if run.progress.updates == 3:
            act("step")

    def on_evaluation_end(self, run):
        act("evaluation")

Trainer(
    strategy="STRATEGY", devices=SIZE, max_epochs=1, callbacks=[Acts()], run_dir="run", loggers=(),
    progress_bar=False, checkpoint=CheckpointConfig(every="2 steps", by=None), STALL
).fit(Task(), pairs(40 * SIZE, num_workers=WORKERS), pairs(8))
"""

SLEEPS = "time.sleep(1000)"
RAISES = "raise ValueError('boom')"


def program(
    strategy: str, size: int, where: str, act: str, workers: int = 0, stall: str = ""
) -> pytest.MarkDecorator:
    """A training of which the last rank acts at a place."""
    text = PROGRAM.replace("STRATEGY", strategy).replace("SIZE", str(size)).replace("WHERE", where)
    text = text.replace("ACT", act).replace("WORKERS", str(workers)).replace("STALL", stall)
    return pytest.mark.program(text, PYTHONPATH=PATHS)


def of(strategy: str, size: int, package: str | None = None) -> object:
    """A training under a strategy, the last rank of which sleeps."""
    marks = [program(strategy, size, "step", SLEEPS)]
    if package is not None and importlib.util.find_spec(package) is None:
        marks.append(pytest.mark.skip(f"needs {package}"))
    return pytest.param(size, marks=marks, id=f"{strategy} x{size}")


def stacks(ended: Ended) -> dict[str, str]:
    """The stacks of all ranks, from where the last lines say that they are."""
    told = next(each for each in ended.errors if "the stacks of all ranks are in " in each)
    directory = Path(told.partition("the stacks of all ranks are in ")[2])
    assert directory.parent.name == "failures"
    return {each.name: each.read_text(encoding="utf-8") for each in directory.iterdir()}


@pytest.mark.skipif(machine() is None, reason="needs Linux, which tells in which call a process is")
@pytest.mark.parametrize(
    "size", [of("ddp", 4), of("zero2", 2, "deepspeed"), of("accelerate", 2, "accelerate")]
)
def test_a_rank_that_sleeps_for_ever_ends_all_and_is_named(ended: Ended, size: int) -> None:
    assert ended.code == 75, ended.errors
    others = f"ranks {', '.join(map(str, range(size - 2)))} and {size - 2}" if size > 2 else "rank 0"
    assert re.fullmatch(
        rf"drivetrain: rank {size - 1} will not come back from a sleep \(program.py:\d+\), in training, after"
        rf" update 3, in on_step_end of Acts; {others} waits? in \w+ \(program.py:\d+\)",
        ended.errors[-1],
    ), ended.errors[-1]
    found = stacks(ended)
    assert sorted(found) == [f"rank{rank}.txt" for rank in range(size)]
    assert "in on_step_end" in found[f"rank{size - 1}.txt"]
    assert all("in train_step" in each for each in found.values()), "the main threads are there"


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
        r"rank 1 failed first.*: it was killed by SIGABRT; what it had to say stands above; rank 0 was in"
        r" training, after update 3, in the backward$",
        ended.errors[-1],
    ), ended.errors[-1]


@program("ddp", 2, "forward", RAISES, workers=1)
def test_the_part_of_the_step_is_named_and_the_stacks_of_a_loaders_workers_are_there(ended: Ended) -> None:
    place = "in training, after update 2, in the forward"
    assert ended.errors[-1].endswith(f"RankFailure: rank 1 failed first, {place}: ValueError: boom")
    if machine() is not None:  # where a process can be made to write its stacks
        for text in stacks(ended).values():
            assert "/data/workers.py" in text.partition("\nThe worker process ")[2], text


@program("fsdp", 2, "step", SLEEPS, stall="stall_timeout=None, hang_timeout=2.0")
def test_without_a_stall_timeout_only_a_hang_timeout_ends_it(ended: Ended) -> None:
    assert ended.code == 75
    assert ended.errors[-1].startswith(
        "drivetrain: no progress for 2 s; rank 1 is in training, after update 3"
    )
