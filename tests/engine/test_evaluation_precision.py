"""Evaluations with weights in another dtype than in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import FSDPConfig, LambdaCallback, StrategyError, Trainer
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed


class Seen(Regression):
    """Notes the dtypes of weights and inputs, and has a buffer that an evaluation changes."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("mean", torch.full((1,), 1 / 3))
        self.seen: set[tuple[bool, torch.dtype, torch.dtype]] = set()

    def forward(self, features: Tensor) -> Tensor:
        self.seen.add((self.training, features.dtype, self.line.weight.dtype))
        if not self.training:
            self.mean.add_(1)
        return super().forward(features) + self.mean


def fitted(**options: Any) -> tuple[Seen, dict[str, float]]:
    task = Seen()
    result = quiet(max_epochs=2, **options).fit(task, pairs(8), pairs(6))
    return task, result.metrics


def test_a_validation_runs_in_it_and_training_goes_on_bitwise() -> None:
    plain, metrics = fitted(evaluation_precision="64")
    task, lower = fitted(evaluation_precision="bf16-true")
    expected = {(True, torch.float32, torch.float32), (False, torch.bfloat16, torch.bfloat16)}
    assert task.seen == expected
    assert torch.equal(task.line.weight, plain.line.weight)
    assert torch.equal(task.line.weight, fitted(validate_every=None)[0].line.weight)
    assert torch.equal(task.mean, torch.full((1,), 1 / 3))
    assert abs(lower["validation/loss"] - metrics["validation/loss"]) > 0
    assert lower["train/loss"] == metrics["train/loss"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_context_of_training_returns(precision: str) -> None:
    task, _ = fitted(precision=precision, evaluation_precision="64")
    assert {each for each in task.seen if not each[0]} == {(False, torch.float64, torch.float64)}
    plain, _ = fitted(precision=precision, validate_every=None)
    assert torch.equal(task.line.weight, plain.line.weight)


def test_the_weights_return_after_an_error_and_other_verbs_use_it_too() -> None:
    def fail(run: Any) -> None:
        raise ValueError("stop")

    task = Seen()
    before = task.line.weight.detach().clone()
    trainer = quiet(evaluation_precision="16-true", callbacks=[LambdaCallback(on_evaluation_end=fail)])
    with pytest.raises(ValueError, match="stop"):
        trainer.validate(task, pairs())
    assert torch.equal(task.line.weight, before)
    outputs = quiet(evaluation_precision="16-true").predict(task, pairs())
    assert outputs[0].dtype == torch.float16
    assert task.line.weight.dtype == torch.float32


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_it_works_on_two_ranks() -> None:
    assert run_distributed(_on_two) == [(["torch.bfloat16"], "torch.float32")] * 2


def _on_two() -> tuple[list[str], str]:
    task, _ = fitted(evaluation_precision="bf16-true", strategy=DDP(world_size=2), devices=2)
    return [str(weights) for training, _, weights in task.seen if not training], str(task.line.weight.dtype)


def test_sharded_weights_are_refused_by_name() -> None:
    with pytest.raises(StrategyError, match=r"'bf16-true' with strategy 'fsdp': shards are gathered in"):
        Trainer(strategy=FSDPConfig(), evaluation_precision="bf16-true")
