"""A loop of one's own over any module: accumulation, weights, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import NextToken, Regression, pairs, quiet, ragged
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import ConfigError, Engine, OptimizerConfig


def own_loop(engine: Engine, data: Any, micro_batches: int = 1, steps: int = 99) -> nn.Module:
    """The documented loop over an `nn.Module`, with token weights and accumulation."""
    task = NextToken(OptimizerConfig("sgd"))
    model, optimizer = engine.prepare(task, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    waiting = 0
    for number, batch in enumerate(engine.prepare_data(data)):
        if number == steps * micro_batches:
            break
        engine.backward(task.loss(model(batch["tokens"]), batch), weight=task.loss_weight(batch))
        waiting += 1
        if waiting == micro_batches:
            engine.step(optimizer, max_grad_norm=1.0)
            waiting = 0
    if waiting:
        engine.step(optimizer, max_grad_norm=1.0)
    return task


@pytest.mark.parametrize("split", [(4, 2), (1, 8)])
def test_accumulated_backwards_equal_the_big_batch(split: tuple[int, int]) -> None:
    """With a short last window, and a sequence that is padding alone."""

    def train(batch_size: int, micro_batches: int) -> nn.Module:
        return own_loop(Engine("cpu", "64"), DataLoader(ragged(), batch_size=batch_size), micro_batches)  # type: ignore[arg-type]

    whole, parts = train(8, 1), train(*split)
    for name, value in whole.state_dict().items():
        assert torch.allclose(parts.state_dict()[name], value, rtol=1e-12, atol=0), name


def test_a_loop_of_ones_own_equals_the_trainers() -> None:
    data = DataLoader(ragged(), batch_size=4)  # type: ignore[arg-type]
    task = NextToken(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    quiet(max_epochs=1, max_grad_norm=1.0).fit(task, data)
    assert weights(own_loop(Engine("cpu"), data)) == weights(task)


@pytest.mark.parametrize("in_memory", [False, True], ids=["loader", "list"])
def test_dropout_in_a_loop_of_ones_own_is_the_trainers(in_memory: bool) -> None:
    data = list(pairs()) if in_memory else pairs()
    task = Regression(lambda params: torch.optim.SGD(params, lr=0.1), dropout=0.5)
    quiet(max_epochs=1, seed=4).fit(task, data)
    engine = Engine("cpu", seed=4)
    model, optimizer = engine.prepare(Regression(dropout=0.5), lambda params: torch.optim.SGD(params, lr=0.1))
    for features, target in engine.prepare_data(data):
        engine.backward(F.mse_loss(model(features), target))
        engine.step(optimizer)
    assert weights(model.task) == weights(task)


def test_the_micro_batches_of_a_window_draw_differently() -> None:
    engine = Engine("cpu")
    draws = [torch.rand(()).item() for _ in engine.prepare_data(pairs())]
    assert len(set(draws)) == len(draws) == 5


def test_a_first_micro_batch_of_weight_zero_contributes_nothing() -> None:
    engine = Engine("cpu")
    model, optimizer = engine.prepare(Regression(), lambda params: torch.optim.SGD(params, lr=0.1))
    other, right = engine.prepare(Regression(), lambda params: torch.optim.SGD(params, lr=0.1))
    features, target = next(iter(pairs()))
    engine.backward(model(features).mean() * float("nan"), weight=0)
    engine.backward(F.mse_loss(model(features), target), weight=3)
    engine.step(optimizer)
    engine.backward(F.mse_loss(other(features), target))
    engine.step(right)
    assert weights(model) == weights(other)


def test_a_window_of_weight_zero_changes_nothing() -> None:
    engine = Engine("cpu")
    model, optimizer = engine.prepare(Regression(), lambda params: torch.optim.AdamW(params, lr=0.1))
    before = weights(model)
    engine.backward(model(next(iter(pairs()))[0]).mean() * float("nan"), weight=0)
    engine.step(optimizer, max_grad_norm=1.0)
    assert weights(model) == before


@pytest.mark.parametrize("weight", [-1, float("nan")])
def test_a_weight_that_counts_nothing_is_refused(weight: float) -> None:
    engine = Engine("cpu")
    model = engine.prepare(Regression())
    with pytest.raises(ConfigError, match="weight"):
        engine.backward(model(torch.ones(1, 4)).mean(), weight=weight)


def test_a_step_without_a_backward_is_refused() -> None:
    engine = Engine("cpu")
    _, optimizer = engine.prepare(Regression(), lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ConfigError, match=r"without engine\.backward"):
        engine.step(optimizer)


def test_the_models_forward_runs_in_the_engines_precision() -> None:
    model = Engine("cpu", "bf16-mixed").prepare(Regression())
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16
