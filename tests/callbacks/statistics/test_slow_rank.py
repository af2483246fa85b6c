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


def measured(strategy: str, where: str, others: float) -> tuple[list[dict[str, float]], list[str]]:
    points: list[dict[str, float]] = []
    slow_rank.perf_counter = lambda: Slow.seconds
    # Where the ranks meet in the forward, it is rank 0 that waits in it.
    Slow.of_ranks = {"forward": (100.0, 300.0), "start": (300.0, 100.0), "body": (100.0, 100.0)}[where]

    def spend(run: Any) -> None:
        run.timing["compute"] += others
        Slow.seconds += 200.0 if where == "start" and run.engine.ranks.rank == 1 else 0.0
        Slow.seconds += 1e6 if run.progress.steps == 0 and run.engine.ranks.rank == 0 else 0.0

    def wait(run: Any) -> None:
        Slow.seconds += 1e6 * run.engine.ranks.rank

    acts = LambdaCallback(on_step_start=spend, on_evaluation_start=wait)
    note = LambdaCallback(on_log=lambda run: points.append(dict(run.logged)))
    with heard() as told:
        options = {"validate_every": "3 steps", "callbacks": [acts, SlowRank(log_points=3), note]}
        trainer = quiet(strategy=strategy, devices=2, max_steps=12, log_every=3, **options)
        for _ in trainer.steps(Slow(), pairs(40), pairs(4)):
            Slow.seconds += 200.0 if where == "body" and torch.distributed.get_rank() == 1 else 0.0
    return [each for each in points if "slow_rank/rank" in each], told


@pytest.mark.parametrize(
    ("strategy", "where", "others", "seconds"),
    [("ddp", "forward", 0.0, 300), ("fsdp", "start", 0.0, 300), ("ddp", "body", 1e5, 100 + 400 / 3)],
)
def test_the_slowest_rank_is_logged_and_one_that_costs_much_of_a_step_is_named_once(
    strategy: str, where: str, others: float, seconds: float
) -> None:
    """Neither the first step counts, nor an evaluation, nor the body of a loop before a log point."""
    (points, told), (same, nothing) = run_distributed(measured, strategy, where, others, world_size=2)
    assert len(points) == 4
    assert nothing == []
    for point, other in zip(points[1:], same[1:], strict=True):
        assert point["slow_rank/rank"] == other["slow_rank/rank"] == 1
        assert point["slow_rank/seconds"] == pytest.approx(seconds)
        assert point["slow_rank/ratio"] == pytest.approx(seconds / 100)
    named = f"rank 1 on {socket.gethostname()} is slow: at 3 log points in a row"
    found = [each for each in told if "slow" in each]
    assert [each.startswith(named) for each in found] == ([] if others else [True])
