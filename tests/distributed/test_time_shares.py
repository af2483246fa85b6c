"""How a rank's time divides into its own work and waiting is seen from another thread, and told to all."""

import sys

import pytest
import torch
from tests.distributed.running import run

from drivetrain.distributed.time_shares import TimeShares


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux, where it can be seen")
def test_samples_are_taken_at_random_distances_so_that_no_rhythm_of_updates_hides_a_part() -> None:
    distances: list[float] = []

    class Done:  # never set, until it was asked 20 times
        def wait(self, seconds: float) -> bool:
            distances.append(seconds)
            return len(distances) == 20

    shares = TimeShares((lambda: None).__code__)
    shares._done = Done()
    shares._look()
    assert len(set(distances)) == 20
    assert 0.01 < min(distances) < max(distances) < 0.1


@pytest.mark.landing
@pytest.mark.real("a rank sleeps in its steps")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux, where it can be seen")
def test_a_training_tells_which_rank_is_slow() -> None:
    ended = run("slow_rank.py")
    assert ended.code == 0, ended.errors
    rows = [list(map(float, line.split())) for line in ended.out.splitlines()]
    assert len(rows) >= 2
    for slowest, ratio, waiting in rows:  # of its own work rank 1 has four times as much
        assert slowest == 1
        assert ratio > 1.2
        assert waiting > 0.05
    (line,) = ended.errors
    assert line.startswith("drivetrain: rank 1 is slow, and the others wait for it")
