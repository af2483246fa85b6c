"""Clipping the elements of the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import OptimizerConfig, StrategyError, TaskModule, Trainer
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.deepspeed.strategy import DeepSpeed
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.single import SingleDevice
from drivetrain.testing.distributed import run_distributed


def trained(task: Any, **options: Any) -> Tensor:
    """The change of the weights in one update; with SGD and a rate of 1 the clipped gradient, negated."""
    before = task.line.weight.detach().clone()
    quiet(max_steps=1, **options).fit(task, pairs(8, 8 // options.get("devices", 1)))
    return task.line.weight.detach() - before


def by_value(**options: Any) -> tuple[Tensor, Tensor]:
    sgd = OptimizerConfig("sgd", lr=1.0)
    return trained(Regression(sgd), **options), trained(Regression(sgd), max_grad_value=0.5, **options)


def test_each_element_of_an_update_is_clipped() -> None:
    whole, clipped = by_value()
    assert whole.abs().max() > 0.5 > whole.abs().min()
    torch.testing.assert_close(clipped, whole.clamp(-0.5, 0.5))
    torch.testing.assert_close(by_value(gradient_accumulation_steps=2)[1], clipped)
    torch.testing.assert_close(by_value(precision="16-mixed")[1], clipped, atol=1e-3, rtol=1e-3)  # unscaled


def test_an_optimizers_own_limit_of_the_norm_replaces_it() -> None:
    own = OptimizerConfig("sgd", lr=1.0, max_grad_norm=100.0)
    torch.testing.assert_close(trained(Regression(own), max_grad_value=0.5), by_value()[0])


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_it_is_the_gradient_of_all_processes_that_is_clipped(kind: Any) -> None:
    for clipped in run_distributed(_on_two, kind):
        torch.testing.assert_close(torch.tensor(clipped), by_value()[1])


def _on_two(kind: Any) -> list[list[float]]:
    found: list[list[float]] = by_value(strategy=kind(world_size=2), devices=2)[1].tolist()
    return found


class Looked(TaskModule):
    """Looks up one row twice: a sparse gradient with two entries for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 2, sparse=True)

    def training_step(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.rows(batch), torch.full((2, 2), 9.0))

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=1.0)


def test_the_entries_of_a_sparse_gradient_are_summed_first() -> None:
    task = Looked()
    nn.init.zeros_(task.rows.weight)
    quiet(max_steps=1, max_grad_value=8.0).fit(task, [torch.tensor([1, 1])])
    assert task.rows.weight.tolist() == [[0, 0], [8, 8], [0, 0]]  # not 4.5 + 4.5


def test_a_strategy_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleDevice, "no_value_clipping", DeepSpeed.no_value_clipping)
    with pytest.raises(StrategyError, match=r"max_grad_value with strategy 'single': DeepSpeed's optim"):
        Trainer(strategy="cpu", max_grad_value=1.0)
