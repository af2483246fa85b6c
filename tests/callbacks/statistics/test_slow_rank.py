"""SlowRank: the rank that the others wait for, by a clock that the ranks' forwards move."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.callbacks import SlowRank
from drivetrain.callbacks.statistics import slow_rank
from drivetrain.testing import run_distributed


class Slow(Regression):
    seconds = 0.0
    of_ranks = (100.0, 300.0)

    def training_step(self, batch: Any) -> Any:
        Slow.seconds += Slow.of_ranks[torch.distributed.get_rank()]
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        Slow.seconds += 1e6 * torch.distributed.get_rank()
        return super().validation_step(batch)


def measured(strategy: str, where: str, others: float, at: Path) -> tuple[list[dict[str, float]], list[str]]:
    points: list[dict[str, float]] = []
    slow_rank.perf_counter = lambda: Slow.seconds
    # Where the ranks meet in the forward, it is rank 0 that waits in it.
    Slow.of_ranks = {"forward": (100.0, 300.0), "end": (300.0, 100.0), "body": (100.0, 100.0)}[where]

    def spend(run: Any) -> None:
        run.timing["compute"] += others
        Slow.seconds += 1e6 if run.progress.steps == 0 and run.engine.ranks.rank == 0 else 0.0

    def end(run: Any) -> None:
        Slow.seconds += 200.0 if where == "end" and run.engine.ranks.rank == 1 else 0.0

    def wait(run: Any) -> None:
        Slow.seconds += 1e6 * run.engine.ranks.rank

    first = LambdaCallback(on_checkpoint_saved=wait)
    acts = LambdaCallback(on_step_start=spend, on_step_end=end)
    note = LambdaCallback(on_log=lambda run: points.append({**run.logged, "told": len(told)}))
    with heard() as told:
        saves = {"run_dir": at, "checkpoint": CheckpointConfig(every="11 steps")}
        callbacks = [first, SlowRank(log_points=3), acts, note]
        options = {"validate_every": "4 steps", "callbacks": callbacks, **saves}
        trainer = quiet(strategy=strategy, devices=2, max_steps=12, log_every=3, **options)
        for _ in trainer.steps(Slow(), pairs(40), pairs(4)):
            Slow.seconds += 200.0 if where == "body" and torch.distributed.get_rank() == 1 else 0.0
    return [each for each in points if "slow_rank/rank" in each], told


@pytest.mark.parametrize(
    ("kind", "where", "others", "seconds"),
    [("ddp", "forward", 0.0, 300), ("fsdp", "end", 0.0, 100 + 200 / 3), ("ddp", "body", 1e5, 100 + 200 / 3)],
)
def test_the_slowest_rank_is_logged_and_one_that_costs_much_of_a_step_is_named_once(
    kind: str, where: str, others: float, seconds: float, tmp_path: Path
) -> None:
    """Neither the first step counts, nor an evaluation or a save, nor the body of a loop before these."""
    (points, told), (same, nothing) = run_distributed(measured, kind, where, others, tmp_path, world_size=2)
    assert nothing == []
    for point, other, expected in zip(points, same, [300, *[seconds] * 3], strict=True):
        assert point["slow_rank/rank"] == other["slow_rank/rank"] == 1
        assert point["slow_rank/seconds"] == pytest.approx(expected)
        assert point["slow_rank/ratio"] == pytest.approx(expected / 100)
    named = f"rank 1 on {socket.gethostname()} is slow: at 3 log points in a row"
    assert [each.startswith(named) for each in told if "slow" in each] == ([] if others else [True])
    assert [each["told"] - points[0]["told"] for each in points[1:]] == ([0, 0, 0] if others else [0, 1, 1])
