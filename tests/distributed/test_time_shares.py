"""How a rank's time divides into its own work and waiting is seen from beside, and told to all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from tests.support.failing import Ended

import drivetrain

PATHS = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(drivetrain.__file__).parents[1])))
"""Where the programs find the tests' tasks, and this very package."""

SLOW = """
import sys, time
import torch
from tests.support.tasks import Regression, pairs, quiet
from drivetrain.callbacks import Throughput, stragglers

stragglers.LEAST = 1.0

class Slow(Regression):
    def forward(self, features):
        time.sleep(0.06 if torch.distributed.get_rank() == 1 else 0.02)
        return super().forward(features)

class Shows:
    def on_log(self, run):
        if run.is_main and "throughput/slowest_rank" in run.logged:
            names = ("slowest_rank", "slowest_rank_ratio", "waiting_share")
            print(*(run.logged[f"throughput/{name}"] for name in names), flush=True)

trainer = quiet(max_steps=75, strategy="STRATEGY", devices=2, log_every=15, callbacks=[Throughput(), Shows()])
trainer.fit(Slow(), pairs(300))
"""


def slow(strategy: str) -> pytest.MarkDecorator:
    text = SLOW.replace("STRATEGY", strategy)
    return pytest.mark.program(text, PYTHONPATH=PATHS)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux, where it can be seen")
@pytest.mark.parametrize("strategy", [pytest.param(each, marks=slow(each)) for each in ("ddp", "fsdp")])
def test_a_training_tells_which_rank_is_slow(ended: Ended, strategy: str) -> None:
    assert ended.code == 0, ended.errors
    rows = [list(map(float, line.split())) for line in ended.out.splitlines()]
    assert len(rows) >= 2
    for slowest, ratio, waiting in rows:
        assert slowest == 1
        assert ratio > 1.3
        assert 0.1 < waiting < 0.6
    (line,) = ended.errors
    assert line.startswith("drivetrain: rank 1 is slow, and the others wait for it")
