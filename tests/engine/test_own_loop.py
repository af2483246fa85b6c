"""Your own loop over any module (`Engine.prepare`, `backward`, `step`): accumulation, weights, precision."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.outcome import weights
from tests.support.refusals import assert_refused
from tests.support.tasks import NextToken, Regression, pairs, quiet, ragged
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import ConfigError, Engine, OptimizerConfig


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def own_loop(engine: Engine, data: Any, micro_batches: int = 1) -> nn.Module:
    """The documented loop over an `nn.Module`, with token weights and accumulation."""
    task = NextToken(OptimizerConfig("sgd"))
    model, optimizer = engine.prepare(task, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    waiting = 0
    for batch in engine.prepare_data(data):
        engine.backward(task.loss(model(batch["tokens"]), batch), weight=task.loss_weight(batch))
        waiting += 1
        if waiting == micro_batches:
            engine.step(optimizer, max_grad_norm=1.0)
            waiting = 0
    if waiting:
        engine.step(optimizer, max_grad_norm=1.0)
    return task


def test_accumulated_backwards_equal_the_big_batch() -> None:
    """With a short last window, and a sequence that is padding alone."""
    states = [
        own_loop(Engine("cpu", "64"), DataLoader(ragged(), batch_size=size), micro_batches).state_dict()
        for size, micro_batches in ((8, 1), (4, 2), (1, 8))
    ]
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.allclose(state[name], value, rtol=1e-12, atol=0), name


def test_your_own_loop_equals_the_trainers() -> None:
    data = DataLoader(ragged(), batch_size=4)
    task = NextToken(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    quiet(max_epochs=1, max_grad_norm=1.0).fit(task, data)
    assert weights(own_loop(Engine("cpu"), data)) == weights(task)
    for batches in (pairs(), list(pairs())):  # with dropout, over a loader and over batches in memory
        task = Regression(sgd, dropout=0.5)
        quiet(max_epochs=1, seed=4).fit(task, batches)
        engine = Engine("cpu", seed=4)
        model, optimizer = engine.prepare(Regression(dropout=0.5), sgd)
        for features, target in engine.prepare_data(batches):
            engine.backward(F.mse_loss(model(features), target))
            engine.step(optimizer)
        assert weights(model.task) == weights(task)


def test_the_micro_batches_of_a_window_draw_differently() -> None:
    draws = [torch.rand(()).item() for _ in Engine("cpu").prepare_data(pairs())]
    assert len(set(draws)) == len(draws) == 5


def test_a_backward_of_weight_zero_contributes_nothing() -> None:
    engine = Engine("cpu")
    (model, optimizer), (other, right) = (engine.prepare(Regression(), sgd) for _ in range(2))
    before = weights(model)
    features, target = next(iter(pairs()))
    engine.backward(model(features).mean() * float("nan"), weight=0)
    engine.step(optimizer, max_grad_norm=1.0)  # a window of weight zero changes nothing
    assert weights(model) == before
    engine.backward(model(features).mean() * float("nan"), weight=0)
    engine.backward(F.mse_loss(model(features), target), weight=3)
    engine.step(optimizer)
    engine.backward(F.mse_loss(other(features), target))
    engine.step(right)
    assert weights(model) == weights(other)


def test_refusals_in_your_own_loop_and_its_precision() -> None:
    engine = Engine("cpu", "bf16-mixed")
    model, optimizer = engine.prepare(Regression(), sgd)
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    loss = torch.ones((), requires_grad=True)
    assert_refused(
        ConfigError,
        {
            "step without a backward": (lambda: engine.step(optimizer), "without engine.backward"),
            "negative weight": (lambda: engine.backward(loss, weight=-1), "weight"),
            "weight of NaN": (lambda: engine.backward(loss, weight=float("nan")), "weight"),
        },
    )
