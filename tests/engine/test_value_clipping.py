"""Clipping the elements of the gradient (`max_grad_value`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import OptimizerConfig, StrategyError, TaskModule, Trainer
from drivetrain.strategies.deepspeed.strategy import DeepSpeed
from drivetrain.strategies.single import SingleDevice


def trained(optimizer: OptimizerConfig, **options: Any) -> Tensor:
    """The change of the weights in one update; with SGD and a rate of 1 the clipped gradient, negated."""
    task = Regression(optimizer)
    before = task.line.weight.detach().clone()
    quiet(max_steps=1, **options).fit(task, pairs(8, 8 // options.get("devices", 1)))
    return task.line.weight.detach() - before


def by_value(**options: Any) -> tuple[Tensor, Tensor]:
    sgd = OptimizerConfig("sgd", lr=1.0)
    return trained(sgd, **options), trained(sgd, max_grad_value=0.5, **options)


def test_max_grad_value_clips_each_element_of_an_update() -> None:
    whole, clipped = by_value()
    assert whole.abs().max() > 0.5 > whole.abs().min()
    torch.testing.assert_close(clipped, whole.clamp(-0.5, 0.5))
    torch.testing.assert_close(by_value(gradient_accumulation_steps=2)[1], clipped)
    torch.testing.assert_close(by_value(precision="16-mixed")[1], clipped, atol=1e-3, rtol=1e-3)  # unscaled
    own = OptimizerConfig("sgd", lr=1.0, max_grad_norm=100.0)  # an optimizer's own limit replaces it
    torch.testing.assert_close(trained(own, max_grad_value=0.5), whole)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_max_grad_value_clips_the_gradient_of_all_ranks(strategy: str) -> None:
    for clipped in on_two_ranks(lambda: by_value(strategy=strategy, devices=2)[1]):
        torch.testing.assert_close(clipped, by_value()[1])


class Looked(TaskModule):
    """Looks up one row twice: a sparse gradient with two entries for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 2, sparse=True)
        nn.init.zeros_(self.rows.weight)

    def training_step(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.rows(batch), torch.full((2, 2), 9.0))

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=1.0)


def test_max_grad_value_sums_the_entries_of_a_sparse_gradient_first() -> None:
    task = Looked()
    quiet(max_steps=1, max_grad_value=8.0).fit(task, [torch.tensor([1, 1])])
    assert task.rows.weight.tolist() == [[0, 0], [8, 8], [0, 0]]  # not 4.5 + 4.5


def test_max_grad_value_is_refused_by_a_strategy_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleDevice, "no_value_clipping", DeepSpeed.no_value_clipping)
    with pytest.raises(StrategyError, match="max_grad_value with strategy 'single': DeepSpeed's optim"):
        Trainer(strategy="cpu", max_grad_value=1.0)
