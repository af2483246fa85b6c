"""One device: devices that are not there, backward by shares, clipping, and skipping under loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import StrategyError
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.precision.registry import PRECISIONS, as_precision
from drivetrain.task.task import StepModule


def prepared(precision: str = "32", parameters: int = 3) -> tuple[SingleDevice, nn.Linear, torch.optim.SGD]:
    """A strategy with a model of one row of weights, and its optimizer with a rate of 1."""
    strategy = SingleDevice("cpu")
    model = nn.Linear(parameters, 1, bias=False)
    nn.init.ones_(model.weight)

    def make(_: nn.Module) -> dict[str, Any]:
        return {"default": torch.optim.SGD(model.parameters(), lr=1.0)}

    made = strategy.prepare(StepModule(model), make, as_precision(precision))
    assert isinstance(made.optimizer, torch.optim.SGD)
    return strategy, model, made.optimizer


def gradient(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("device", ["gpu", "meta", "xla", "", "cuda:x", 1.5])
def test_what_is_no_device_for_training_is_refused(device: Any) -> None:
    with pytest.raises(
        StrategyError, match="a single device must be 'cpu', 'cuda', 'cuda:1', 'mps' or 'xpu', not"
    ):
        SingleDevice(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_gpu_is_named_with_the_way_out(device: str) -> None:
    with pytest.raises(StrategyError, match=f"'{device}' is not available: .*strategy='cpu' or 'auto'"):
        SingleDevice(device)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has Metal")
def test_missing_metal_is_named_with_the_way_out() -> None:
    with pytest.raises(StrategyError, match=r"'mps' is not available: .*strategy='cpu' or 'auto'"):
        SingleDevice("mps")


def test_the_cpu_supports_every_built_in_precision() -> None:
    assert all(SingleDevice("cpu").supports(PRECISIONS[name]) for name in PRECISIONS)


def test_metal_has_no_float64_and_says_what_it_has() -> None:
    metal = SingleDevice("cpu")
    metal.device = torch.device("mps")
    assert [name for name in PRECISIONS if not metal.supports(PRECISIONS[name])] == ["64"]
    assert "allowed are '32', 'bf16-mixed'" in metal.supports(PRECISIONS["64"]).reason


def test_shares_of_several_losses_add_up_to_their_weighted_mean() -> None:
    strategy, model, _ = prepared()
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    strategy.backward(model(rows[0]).sum(), 0.25)
    strategy.backward(model(rows[1]).sum(), torch.tensor(0.75))
    assert gradient(model).tolist() == [[0.25, 1.5, 0.0]]


def test_without_a_share_the_whole_loss_counts() -> None:
    strategy, model, _ = prepared()
    strategy.backward(model(torch.ones(3)).sum())
    assert gradient(model).tolist() == [[1.0, 1.0, 1.0]]


def test_backward_adds_to_the_given_parameters_alone() -> None:
    strategy, model, _ = prepared()
    other = nn.Parameter(torch.ones(()))
    strategy.backward(model(torch.ones(3)).sum() * other, inputs=[other])
    assert model.weight.grad is None
    assert other.grad is not None
    assert other.grad.item() == 3.0


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


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    before = strategy.state_dict()["scaler"]["scale"]
    assert not overflowing_update(strategy, model, optimizer)
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]
    assert strategy.state_dict()["scaler"]["scale"] == before / 2


def test_without_loss_scaling_nothing_is_skipped() -> None:
    strategy, model, optimizer = prepared("32")
    assert overflowing_update(strategy, model, optimizer)
    assert strategy.state_dict() == {}


def test_overflows_without_end_are_an_error_that_says_that_the_scale_is_not_the_cause() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    for _ in range(30):
        assert not overflowing_update(strategy, model, optimizer, torch.inf)
    assert strategy.state_dict()["scaler"]["scale"] == 2.0**-14
    with pytest.raises(StrategyError, match=r"gradients overflow even at the smallest.*'bf16-mixed'"):
        overflowing_update(strategy, model, optimizer, torch.inf)


def test_an_update_without_any_gradient_says_nothing_of_the_scale() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    before = strategy.state_dict()
    for _ in range(2):
        strategy.unscale(optimizer)
        assert strategy.optimizer_step(optimizer)
        assert strategy.state_dict() == before
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]


def test_the_loss_scale_is_stored_and_taken_over() -> None:
    strategy, model, optimizer = prepared("16-mixed")
    overflowing_update(strategy, model, optimizer)
    other, _, _ = prepared("16-mixed")
    assert other.state_dict() != strategy.state_dict()
    other.load_state_dict(strategy.state_dict())
    assert other.state_dict() == strategy.state_dict()


def test_a_checkpoint_of_another_precision_leaves_the_loss_scale_alone() -> None:
    scaled, plain = prepared("16-mixed")[0], prepared("32")[0]
    before = scaled.state_dict()
    scaled.load_state_dict(plain.state_dict())
    plain.load_state_dict(before)
    assert (scaled.state_dict(), plain.state_dict()) == (before, {})


def test_optimizers_are_made_on_the_parameters_that_will_be_trained() -> None:
    strategy, model, optimizer = prepared("bf16-true")
    assert optimizer.param_groups[0]["params"] == [model.weight]
    assert model.weight.dtype is torch.bfloat16
    assert model.weight.device == strategy.device


def test_without_a_factory_there_are_no_optimizers() -> None:
    model = StepModule(nn.Linear(1, 1))
    made = SingleDevice("cpu").prepare(model, None, as_precision("32"))
    assert made.model is model
    assert made.optimizers == {}
