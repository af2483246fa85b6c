"""A rank of a training fails or is interrupted while the others wait for it: all end, and say why."""

from __future__ import annotations

import re
import signal
import sys
from typing import Any

import pytest
import torch
from tests.support.failing import Ended

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals"),
]

PROGRAM = """
import os, signal, sys, time
import torch
from torch import nn
from drivetrain import Callback, CheckpointConfig, TaskModule, Trainer

def act(here):
    rank = torch.distributed.get_rank()
    if here == "WHERE":
        ACT

class Deep(TaskModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.batches = 0

    def forward(self, x):
        return self.blocks(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def training_step(self, batch):
        self.batches += 1
        if self.batches == 8:
            act("second micro-batch of update 3")
        return super().training_step(batch)

class Acts(Callback):
    def on_checkpoint_saved(self, run):
        act("save")

    def on_evaluation_start(self, run):
        act("evaluation")

    def on_epoch_end(self, run):
        act("epoch end")

trainer = Trainer(
    strategy="STRATEGY", devices=2, max_epochs=2, gradient_accumulation_steps=3, callbacks=[Acts()],
    run_dir="run", checkpoint=CheckpointConfig(every="2 steps", by=None), loggers=(), progress_bar=False,
)
data = [{"x": torch.ones(2, 8)}] * 24
for step in trainer.steps(Deep(), data, data[:4]):
    if step.update == 1:
        act("body")
sys.stdout.write("ended\\n")
"""


def program(strategy: str, where: str, act: str, **options: Any) -> pytest.MarkDecorator:
    """Two ranks that act at a place of a training."""
    text = PROGRAM.replace("STRATEGY", strategy).replace("WHERE", where).replace("ACT", act)
    return pytest.mark.program(text, **options)


KILL = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "if rank == 1: raise ValueError('boom')"
INTERRUPT: dict[str, Any] = {"interrupt": signal.SIGINT, "again": 0.8}
WAIT = "if rank == 1: open('waiting', 'w').close(); time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "last"),
    [
        pytest.param(code, last, marks=program(strategy, where, act), id=f"{strategy}, {where}: {act}")
        for strategy, where, act, code, last in [
            ("ddp", "save", KILL, 1, "RankFailure: rank 1 failed first, last heard of .*: it was killed by"),
            (
                "fsdp",
                "evaluation",
                RAISE,
                1,
                "RankFailure: rank 1 .*, in validation, .*, in on_evaluation_start of Acts: ValueError: boom",
            ),
            (
                "ddp",
                "epoch end",
                "if rank == 0: sys.exit(3)",
                3,
                "rank 0 .*, after update 4, in on_epoch_end of Acts: Sys",
            ),
            (
                "ddp",
                "second micro-batch of update 3",
                KILL.replace("1", "0"),
                -signal.SIGKILL,
                "RankFailure: rank 0 failed first.*: it was killed",
            ),
        ]
    ],
)
def test_the_first_cause_is_the_last_line(ended: Ended, code: int, last: str) -> None:
    assert (ended.code, ended.out) == (code, ""), ended.errors
    assert re.search(last, ended.errors[-1]), ended.errors


@program("ddp", "body", RAISE)
def test_an_error_in_the_body_of_one_ranks_loop_ends_the_run_in_order_and_the_program_badly(
    ended: Ended,
) -> None:
    assert (ended.code, ended.out) == (1, "ended\n"), "the loop of rank 0 ends"
    assert any(each.endswith("ValueError: boom") for each in ended.errors)
    assert ended.errors[-1] == "drivetrain: rank 1 failed: it ended with exit code 1"


@pytest.mark.parametrize(
    "waiting",
    [
        pytest.param("all, at a save", marks=program("fsdp", "save", WAIT, **INTERRUPT, whole_group=True)),
        pytest.param("rank 0, at an epoch's end", marks=program("ddp", "epoch end", WAIT, **INTERRUPT)),
        pytest.param("rank 0, after its body", marks=program("ddp", "body", WAIT, **INTERRUPT)),
    ],
)
def test_a_second_interrupt_ends_all_ranks_at_once(ended: Ended, waiting: str) -> None:
    assert (ended.code, ended.out) == (-signal.SIGINT, ""), ended.errors
    assert any(each.endswith("KeyboardInterrupt") for each in ended.errors)
