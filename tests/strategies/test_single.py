"""One device: skipping under loss scaling."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import StrategyError
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.task import StepModule


def prepared(precision: str = "32") -> tuple[SingleDevice, nn.Linear, torch.optim.SGD]:
    """A strategy with a model of one row of three weights, and its optimizer with a rate of 1."""
    strategy = SingleDevice("cpu")
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)

    def make(_: nn.Module) -> dict[str, Any]:
        return {"default": torch.optim.SGD(model.parameters(), lr=1.0)}

    made = strategy.prepare(StepModule(model), make, as_precision(precision))
    assert isinstance(made.optimizer, torch.optim.SGD)
    return strategy, model, made.optimizer


def overflowing_step(
    strategy: SingleDevice, model: nn.Linear, optimizer: torch.optim.SGD, gradient: float = 1e36
) -> bool:
    strategy.backward(model(torch.full((3,), gradient)).sum())
    strategy.unscale(optimizer)
    applied = strategy.optimizer_step(optimizer)
    optimizer.zero_grad()
    return applied


def test_overflow_skips_the_step_and_halves_the_scale_which_is_stored() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    before = strategy.state_dict()["scaler"]["scale"]
    assert not overflowing_step(strategy, model, optimizer)
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]
    assert strategy.state_dict()["scaler"]["scale"] == before / 2
    other, _, _ = prepared("16-mixed")
    assert other.state_dict() != strategy.state_dict()
    other.load_state_dict(strategy.state_dict())
    assert other.state_dict() == strategy.state_dict()


def test_without_loss_scaling_nothing_is_skipped_or_stored() -> None:
    strategy, model, optimizer = prepared("32")
    assert overflowing_step(strategy, model, optimizer)
    assert strategy.state_dict() == {}
    scaled, _, _ = prepared("16-mixed")
    before = scaled.state_dict()
    scaled.load_state_dict(strategy.state_dict())  # a checkpoint of another precision leaves the scale alone
    strategy.load_state_dict(before)
    assert (scaled.state_dict(), strategy.state_dict()) == (before, {})


def test_overflows_without_end_are_an_error_that_the_scale_does_not_cause() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    for _ in range(30):
        assert not overflowing_step(strategy, model, optimizer, torch.inf)
    assert strategy.state_dict()["scaler"]["scale"] == 2.0**-14
    with pytest.raises(StrategyError, match=r"gradients overflow even at the smallest.*'bf16-mixed'"):
        overflowing_step(strategy, model, optimizer, torch.inf)
