"""The least length of a fit: what waits for it, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, CheckpointConfig, ConfigError, EarlyStopping, Run
from drivetrain.testing import run_distributed


class StopsAt(Callback):
    """Asks once to stop, after one update and on one rank."""

    def __init__(self, update: int, rank: int = 0) -> None:
        self.update, self.rank = update, rank

    def on_step_end(self, run: Run) -> None:
        if run.progress.updates == self.update and run.engine.ranks.rank == self.rank:
            run.stop("enough")


def fit(**options: Any) -> Any:
    return quiet(**{"max_epochs": 4, "callbacks": [StopsAt(2)], **options}).fit(Regression(), pairs(12))


@pytest.mark.parametrize(
    ("least", "ends"),
    [
        ({}, 2),
        ({"min_steps": 2}, 2),
        ({"min_steps": 9}, 9),
        ({"min_epochs": 2}, 12),
        ({"min_steps": 3, "min_epochs": 1}, 6),
    ],
)
def test_a_request_to_stop_waits_for_the_minimum(least: dict[str, int], ends: int) -> None:
    result = fit(**least)
    assert (result.progress.updates, result.stop_reason) == (ends, "enough")


def test_a_limit_ends_a_fit_before_the_minimum() -> None:
    result = fit(min_steps=100)
    assert (result.progress.updates, result.stop_reason) == (24, "max_epochs=4 reached")


def test_early_stopping_judges_from_the_minimum_on() -> None:
    stopping = EarlyStopping("train/loss", patience=1, threshold=1e9)
    result = fit(callbacks=[stopping], log_every="1 epoch", max_epochs=9, min_epochs=5)
    assert result.progress.epoch == 5
    assert "for 4 log points" in result.stop_reason


def test_a_loss_that_is_not_finite_does_not_wait() -> None:
    task = Regression()
    torch.nn.init.constant_(task.line.weight, torch.inf)
    result = quiet(max_epochs=4, min_epochs=4, on_nonfinite="stop", log_every=1).fit(task, pairs(12))
    assert result.progress.updates == 1


def test_a_request_that_waits_is_in_the_checkpoint(tmp_path: Path) -> None:
    policy = CheckpointConfig(every=4, by=None, best=0)

    def train(limit: int, resume: str | None = None) -> Any:
        trainer = quiet(
            max_steps=limit, min_steps=5, run_dir=tmp_path, checkpoint=policy, callbacks=[StopsAt(2)]
        )
        return trainer.fit(Regression(), pairs(12), resume=resume)

    train(5)
    newest = tmp_path / "checkpoints" / "update-00000004"
    result = train(20, resume=str(newest))
    assert (result.progress.updates, result.stop_reason) == (5, "enough")


def on_two_ranks(rank: int) -> tuple[int, str]:
    result = fit(strategy="ddp", devices=2, callbacks=[StopsAt(2, rank=1)], min_steps=5)
    return result.progress.updates, result.stop_reason


def test_ranks_stop_together_at_the_minimum_when_one_has_asked() -> None:
    first, second = run_distributed(on_two_ranks, 2)
    assert first == second
    assert first in ((5, "enough"), (6, "enough"))  # rank 0 may have ended update 5 when rank 1 asks again


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"min_steps": 0}, "min_steps must be a whole number, at least 1, not 0"),
        ({"min_steps": 9, "max_steps": 5}, "min_steps=9 with max_steps=5"),
        ({"min_epochs": 5}, "min_epochs=5 with max_epochs=4"),
    ],
)
def test_a_minimum_that_cannot_be_reached_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fit(**options)
