"""Stepping past torch's wrapper must not be noticed by anybody who listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from drivetrain.strategies.optimizer_step import step

OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
]


def with_gradient() -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
    parameter.grad = torch.tensor([[0.5, 0.25], [-1.0, 2.0]])
    return parameter


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["sgd", "adamw", "fused adamw", "adafactor"])
def test_it_makes_the_very_update_that_the_optimizer_makes(make: Callable[[Any], Optimizer]) -> None:
    ours, theirs = with_gradient(), with_gradient()
    first, second = make([ours]), make([theirs])
    for _ in range(3):
        step(first)
        second.step()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, with_gradient())


def stepped() -> Optimizer:
    return torch.optim.SGD([with_gradient()], lr=0.1)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_an_optimizers_own_hooks_are_called(register: str) -> None:
    heard: list[object] = []
    optimizer = stepped()
    getattr(optimizer, register)(lambda optimizer, *_: heard.append(optimizer))
    step(optimizer)
    assert heard == [optimizer]


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_for_all_optimizers_are_called(register: Callable[[Any], Any]) -> None:
    heard: list[object] = []
    optimizer = stepped()
    handle = register(lambda optimizer, *_: heard.append(optimizer))
    try:
        step(optimizer)
    finally:
        handle.remove()
    assert heard == [optimizer]


def test_a_profiler_sees_the_step() -> None:
    optimizer = stepped()
    with torch.autograd.profiler.profile() as profile:
        step(optimizer)
    assert any(event.name == "Optimizer.step#SGD.step" for event in profile.function_events)


def test_a_learning_rate_scheduler_knows_that_the_optimizer_stepped() -> None:
    """It warns, and in this suite warnings are errors, of a scheduler's step before the optimizer's."""
    optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_step_replaced_on_the_object_is_the_one_that_is_called() -> None:
    heard: list[str] = []
    optimizer = stepped()
    optimizer.step = lambda closure=None: heard.append("replaced")  # type: ignore[method-assign]
    step(optimizer)
    assert heard == ["replaced"]


def test_an_optimizer_of_ones_own_steps_by_its_own_step() -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign())

    parameter = with_gradient()
    step(Sign([parameter]))
    assert parameter.tolist() == [[0.0, -3.0], [4.0, -0.5]]
