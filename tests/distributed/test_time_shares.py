"""How a rank's time divides into its own work and waiting is seen from another thread, and told to all."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.distributed.running import run


@pytest.mark.landing
@pytest.mark.real("a rank sleeps in its steps")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux, where it can be seen")
def test_a_training_tells_which_rank_is_slow() -> None:
    ended = run("slow_rank.py")
    assert ended.code == 0, ended.errors
    rows = [list(map(float, line.split())) for line in ended.out.splitlines()]
    assert len(rows) >= 2
    for slowest, ratio, waiting in rows:  # of its own work rank 1 has 50 times as much
        assert slowest == 1
        assert ratio > 1.2
        assert waiting > 0.05
    (line,) = ended.errors
    assert line.startswith("drivetrain: rank 1 is slow, and the others wait for it")
