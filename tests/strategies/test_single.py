"""One device: backward by shares, clipping, and skipping under loss scaling."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def gradient(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


def test_shares_of_several_losses_add_up_to_their_weighted_mean() -> None:
    strategy, model, _ = prepared()
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    strategy.backward(model(rows[0]).sum(), 0.25)
    strategy.backward(model(rows[1]).sum(), torch.tensor(0.75))
    assert gradient(model).tolist() == [[0.25, 1.5, 0.0]]
    strategy.backward(model(torch.ones(3)).sum())  # without a share the whole loss counts
    assert gradient(model).tolist() == [[1.25, 2.5, 1.0]]


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_clipping_uses_the_norm_of_the_unscaled_gradient(precision: str) -> None:
    strategy, model, optimizer = prepared(precision)
    strategy.backward(model(torch.tensor([3.0, 4.0, 0.0])).sum())
    strategy.unscale(optimizer)
    norm = strategy.clip_grad_norm([model.weight], 1.0)
    assert norm.shape == ()
    assert norm.item() == pytest.approx(5.0, rel=1e-6)
    assert gradient(model).tolist()[0] == pytest.approx([0.6, 0.8, 0.0], rel=1e-5)


def overflowing_update(
    strategy: SingleDevice, model: nn.Linear, optimizer: torch.optim.SGD, gradient: float = 1e36
) -> bool:
    strategy.backward(model(torch.full((3,), gradient)).sum())
    strategy.unscale(optimizer)
    applied = strategy.optimizer_step(optimizer)
    optimizer.zero_grad()
    return applied


def test_overflow_skips_the_update_and_halves_the_scale_which_is_stored() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    before = strategy.state_dict()["scaler"]["scale"]
    assert not overflowing_update(strategy, model, optimizer)
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]
    assert strategy.state_dict()["scaler"]["scale"] == before / 2
    other, _, _ = prepared("16-mixed")
    assert other.state_dict() != strategy.state_dict()
    other.load_state_dict(strategy.state_dict())
    assert other.state_dict() == strategy.state_dict()


def test_without_loss_scaling_nothing_is_skipped_or_stored() -> None:
    strategy, model, optimizer = prepared("32")
    assert overflowing_update(strategy, model, optimizer)
    assert strategy.state_dict() == {}
    scaled, _, _ = prepared("16-mixed")
    before = scaled.state_dict()
    scaled.load_state_dict(strategy.state_dict())  # a checkpoint of another precision leaves the scale alone
    strategy.load_state_dict(before)
    assert (scaled.state_dict(), strategy.state_dict()) == (before, {})


def test_overflows_without_end_are_an_error_that_the_scale_does_not_cause() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    for _ in range(30):
        assert not overflowing_update(strategy, model, optimizer, torch.inf)
    assert strategy.state_dict()["scaler"]["scale"] == 2.0**-14
    with pytest.raises(StrategyError, match=r"gradients overflow even at the smallest.*'bf16-mixed'"):
        overflowing_update(strategy, model, optimizer, torch.inf)


def test_optimizers_are_made_on_the_parameters_that_will_be_trained() -> None:
    strategy, model, optimizer = prepared("bf16-true")
    assert optimizer.param_groups[0]["params"] == [model.weight]
    assert (model.weight.dtype, model.weight.device) == (torch.bfloat16, strategy.device)
    module = StepModule(nn.Linear(1, 1))
    made = SingleDevice("cpu").prepare(module, None, as_precision("32"))
    assert (made.model, made.optimizers) == (module, {})
