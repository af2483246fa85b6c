"""SlowRank: the rank that the others wait for, by a clock that the ranks' forwards move."""

import socket
from typing import Any

import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback
from drivetrain.callbacks import SlowRank
from drivetrain.callbacks.statistics import slow_rank
from drivetrain.testing import run_distributed


class Slow(Regression):
    seconds = 0.0

    def training_step(self, batch: Any) -> Any:
        Slow.seconds += 300.0 if torch.distributed.get_rank() == 1 else 100.0
        return super().training_step(batch)


def measured() -> tuple[list[dict[str, float]], list[str]]:
    points: list[dict[str, float]] = []
    slow_rank.perf_counter = lambda: Slow.seconds
    note = LambdaCallback(on_log=lambda run: points.append(dict(run.logged)))
    with heard() as told:
        options = {"validate_every": "3 steps", "callbacks": [SlowRank(log_points=3), note]}
        quiet(strategy="ddp", devices=2, max_steps=10, log_every=2, **options).fit(
            Slow(), pairs(40), pairs(4)
        )
    return [each for each in points if "slow_rank/rank" in each], told


def test_the_slowest_rank_is_logged_and_one_that_stays_slow_is_named_once() -> None:
    (points, told), (others, nothing) = run_distributed(measured, world_size=2)
    assert len(points) == 5
    assert nothing == []
    for point, other in zip(points, others, strict=True):
        assert point["slow_rank/rank"] == other["slow_rank/rank"] == 1
        assert 299 < point["slow_rank/seconds"] < 320
        assert 2.6 < point["slow_rank/ratio"] < 3.1
    (message,) = [each for each in told if "slow" in each]
    assert message.startswith(f"rank 1 on {socket.gethostname()} is slow: at 3 log points in a row")
