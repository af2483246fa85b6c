"""Evaluations with weights in another dtype than in training (`evaluation_precision`)."""

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import LambdaCallback


class Seen(Regression):  # notes the dtypes of weights and inputs, and has a buffer that an evaluation changes
    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("mean", torch.full((1,), 1 / 3))
        self.seen: set[tuple[bool, torch.dtype, torch.dtype]] = set()

    def forward(self, features: Tensor) -> Tensor:
        self.seen.add((self.training, features.dtype, self.line.weight.dtype))
        if not self.training:
            self.mean.add_(1)
        return super().forward(features) + self.mean


def fitted(**options: Any) -> Seen:
    task = Seen()
    quiet(max_epochs=2, **options).fit(task, pairs(8), pairs(6))
    return task


def test_evaluation_precision_leaves_training_bitwise_the_same() -> None:
    task = fitted(evaluation_precision="bf16-true")
    assert task.seen == {(True, torch.float32, torch.float32), (False, torch.bfloat16, torch.bfloat16)}
    assert torch.equal(task.line.weight, fitted(validate_every=None).line.weight)
    assert torch.equal(task.mean, torch.full((1,), 1 / 3))
    for precision in ("bf16-mixed", "bf16-true"):  # whose context returns
        task = fitted(precision=precision, evaluation_precision="64")
        assert {each for each in task.seen if not each[0]} == {(False, torch.float64, torch.float64)}
        assert torch.equal(task.line.weight, fitted(precision=precision, validate_every=None).line.weight)


def test_evaluation_precision_gives_the_weights_back_after_an_error_and_serves_predict() -> None:
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
