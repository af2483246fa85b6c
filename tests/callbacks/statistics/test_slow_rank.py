"""SlowRank: the rank that the others wait for, by a clock that the ranks' forwards move."""

import socket
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback
from drivetrain.callbacks import SlowRank
from drivetrain.callbacks.statistics import slow_rank
from drivetrain.testing import run_distributed


class Slow(Regression):
    seconds = 0.0
    of_ranks = (100.0, 300.0)

    def training_step(self, batch: Any) -> Any:
        Slow.seconds += Slow.of_ranks[torch.distributed.get_rank()]
        return super().training_step(batch)


def measured(strategy: str, others: float) -> tuple[list[dict[str, float]], list[str]]:
    points: list[dict[str, float]] = []
    slow_rank.perf_counter = lambda: Slow.seconds
    meets = strategy == "fsdp"  # the data is late on rank 1, for which rank 0 waits in the forward
    Slow.of_ranks = (300.0, 100.0) if meets else (100.0, 300.0)

    def spend(run: Any) -> None:
        run.timing["compute"] += others
        run.timing["data"] += 200.0 if meets and run.engine.ranks.rank == 1 else 0.0

    note = LambdaCallback(on_log=lambda run: points.append(dict(run.logged)), on_step_start=spend)
    with heard() as told:
        options = {"validate_every": "3 steps", "callbacks": [SlowRank(log_points=3), note]}
        quiet(strategy=strategy, devices=2, max_steps=10, log_every=2, **options).fit(
            Slow(), pairs(40), pairs(4)
        )
    return [each for each in points if "slow_rank/rank" in each], told


@pytest.mark.parametrize(("strategy", "others"), [("ddp", 0.0), ("fsdp", 0.0), ("ddp", 10_000.0)])
def test_the_slowest_rank_is_logged_and_one_that_costs_much_of_a_step_is_named_once(
    strategy: str, others: float
) -> None:
    (points, told), (same, nothing) = run_distributed(measured, strategy, others, world_size=2)
    assert len(points) == 5
    assert nothing == []
    for point, other in zip(points, same, strict=True):
        assert point["slow_rank/rank"] == other["slow_rank/rank"] == 1
        assert 299 < point["slow_rank/seconds"] < 320
        assert 2.6 < point["slow_rank/ratio"] < 3.1
    named = f"rank 1 on {socket.gethostname()} is slow: at 3 log points in a row"
    found = [each for each in told if "slow" in each]
    assert [each.startswith(named) for each in found] == ([] if others else [True])
