"""The norms of gradients, of the whole task and by layer."""

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Callback, OptimizerConfig, Run, TaskModule
from drivetrain.callbacks import GradientNorms


class Layers(TaskModule):  # two layers, a parameter of its own, and an unused layer
    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)
        self.unused = nn.Linear(2, 2) if unused else None
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(features))) * self.scale

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("sgd", lr=0.1)


class ByHand(Callback):  # the same norms, from whole gradients, in every step; and what was logged
    def __init__(self) -> None:
        self.norms: dict[str, float] = {}
        self.logged: list[dict[str, float]] = []
        self.expected: list[dict[str, float]] = []

    def on_before_optimizer_step(self, run: Run) -> None:
        squares: dict[str, float] = {}
        for name, each in run.task.named_parameters():
            layer = name.rpartition(".")[0] or "(own)"
            squares.setdefault(layer, 0.0)
            if each.grad is not None:
                squares[layer] += float(run.full_tensor(each.grad).to_dense().double().square().sum())
        self.norms = {f"gradients/norm/{layer}": square**0.5 for layer, square in squares.items()}
        self.norms["gradients/norm"] = sum(squares.values()) ** 0.5

    def on_log(self, run: Run) -> None:
        if "train/loss" in run.logged:
            self.logged.append({name: each for name, each in run.logged.items() if "norm" in name})
            self.expected.append(self.norms)


def test_norms_of_the_last_step_are_logged_by_layer_before_clipping() -> None:
    by_hand = ByHand()
    callbacks = [GradientNorms(per_layer=True), by_hand]
    options: Any = {"max_epochs": 2, "gradient_accumulation_steps": 2, "log_every": "1 step"}
    quiet(**options, max_grad_norm=0.01, callbacks=callbacks).fit(Layers(), pairs(), pairs(4))
    assert len(by_hand.logged) == 6
    for logged, expected in zip(by_hand.logged, by_hand.expected, strict=True):
        assert logged == pytest.approx(expected, rel=1e-6)
        assert logged["gradients/norm/first"] > 0.01
        assert logged["gradients/norm/unused"] == 0.0


def test_norms_are_taken_in_steps_that_are_logged_and_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, inner, by_hand = [], torch._foreach_norm, ByHand()

    def counted(*given: Any, **more: Any) -> Any:
        taken.append(1)
        return inner(*given, **more)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    quiet(max_steps=9, log_every="4 steps", callbacks=[GradientNorms(), by_hand]).fit(Layers(), pairs(40))
    assert len(taken) == 4
    assert [set(each) for each in by_hand.logged] == [{"gradients/norm"}] * 3  # without layers


def on_ranks(strategy: str) -> list[dict[str, float]]:
    by_hand = ByHand()
    callbacks = [GradientNorms(per_layer=True), by_hand]
    trainer = quiet(strategy=strategy, devices=2, max_steps=3, log_every="1 step", callbacks=callbacks)
    trainer.fit(Layers(unused=False), pairs(12, batch_size=3))
    for logged, expected in zip(by_hand.logged, by_hand.expected, strict=True):
        assert logged == pytest.approx(expected, rel=1e-5)
    return by_hand.logged


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_norms_on_two_ranks_are_those_of_the_whole_gradient(strategy: str) -> None:
    first, second = on_two_ranks(on_ranks, strategy)
    assert first == second
    alone = ByHand()
    callbacks = [GradientNorms(per_layer=True), alone]
    trainer = quiet(max_steps=2, log_every="1 step", callbacks=callbacks)
    trainer.fit(Layers(unused=False), pairs(12, batch_size=6))
    assert first[:2] == [pytest.approx(each, rel=1e-5) for each in alone.logged]
