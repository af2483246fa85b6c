"""A loop of one's own on several processes: when one fails all end, and the last line says why."""

from __future__ import annotations

import re

import pytest
from tests.support.failing import Ended
from torch import distributed

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
program = pytest.mark.program

PROGRAM = """
import os, signal, sys, time
import torch
from torch import nn
from drivetrain import Engine

engine = Engine("ddp", devices=2)
rank = engine.ranks.rank

def loop():
    model, optimizer = engine.prepare(nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
    for update in range(6):
        if update == 4:
            HERE
        engine.backward(model(torch.ones(2, 2)).square().mean())
        engine.step(optimizer)

AROUND
sys.stdout.write(f"rank {rank} ended\\n")
"""


def text(here: str, around: str = "loop()") -> str:
    return PROGRAM.replace("HERE", here).replace("AROUND", around)


WITH = "with engine:\n    loop()"


@pytest.mark.parametrize(
    ("last", "here"),
    [
        pytest.param(last, here, marks=program(text(here, around)), id=f"{number}")
        for number, (here, around, last) in enumerate(
            (
                ("if rank == 1: raise ValueError('boom')", "loop()", "rank 1 failed first, after update 4: "),
                ("if rank == 0: raise ValueError('boom')", "loop()", "rank 0 failed first, after update 4: "),
                ("if rank == 1: raise ValueError('boom')", WITH, "rank 1 failed first, after update 4: "),
                (
                    "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
                    "loop()",
                    "rank 1 failed first, last heard of .*: it was killed by SIGKILL",
                ),
                (
                    "if rank == 1: sys.exit()",
                    "loop()",
                    "rank 1 failed first, .*after update 4: it had ended when rank 0",
                ),
            )
        )
    ],
)  # fmt: skip
def test_a_loop_that_fails_on_one_rank_ends_on_all_with_the_cause(ended: Ended, last: str, here: str) -> None:
    assert ended.code == 1
    assert re.search(last, ended.errors[-1]), ended.errors


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(around, marks=program(text("time.sleep(rank)", around)))
        for around in ("loop()", WITH, "loop(); loop(); engine.teardown()")
    ],
)
def test_a_loop_that_ends_well_is_silent(ended: Ended, around: str) -> None:
    assert (ended.code, sorted(ended.out.splitlines()), ended.errors) == (
        0,
        ["rank 0 ended", "rank 1 ended"],
        [],
    )


SPAWNED = """
import os, socket, time
import torch
from torch import nn
from drivetrain import Engine

def main(rank):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"],
    )
    engine = Engine("ddp", devices=2)
    model, optimizer = engine.prepare(nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
    engine.backward(model(torch.ones(2, 2)).square().mean())
    engine.step(optimizer)
    time.sleep(3 - 3 * rank)

if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["PORT"] = str(probe.getsockname()[1])
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
"""


@program(SPAWNED)
def test_a_process_of_multiprocessing_that_ends_before_the_others_is_not_lost(ended: Ended) -> None:
    assert (ended.code, ended.errors) == (0, [])
