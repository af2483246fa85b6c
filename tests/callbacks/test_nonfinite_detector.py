"""The module in which a number was first not finite is named, by every way in which a run tells of it."""

import logging
from typing import Any

import pytest
import torch
from tests.support.fragile import FEATURES, GOOD, INPUT, NAN, Fragile, marked
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import NonFiniteDetector, NonFiniteError, OptimizerConfig, TaskModule


class BreaksForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.log(-x.abs()) * 0 if self.breaks else x


class BreaksBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + ((x * 0).square().sum().sqrt() if self.breaks else 0)


class Deep(TaskModule):  # layers, of which one of a kind breaks from a given step on
    def __init__(self, kind: type[nn.Module] | None, at: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(inplace=True))
        parts = [(nn.Linear(6, 6), (kind or nn.Identity)(), nn.Linear(6, 6)) for _ in range(2)]
        self.middle = nn.ModuleList(nn.Sequential(*each) for each in parts)
        self.last = nn.Linear(6, 1)
        self.at, self.seen = at, 0

    def forward(self, features: Tensor) -> Tensor:
        for index, layer in enumerate(self.middle):
            layer[1].breaks = index == 1 and self.seen >= self.at
        self.seen += self.training
        x = self.first(features)
        for layer in self.middle:
            x = layer(x)
        return self.last(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("adamw", lr=0.01)


def batches(bad: int = -1, mark: int = INPUT) -> Any:
    return marked([mark if index == bad else GOOD for index in range(16)], 2)


BATCHES = batches()


def message(
    task: TaskModule, data: Any = BATCHES, ignore: Any = (), validation: Any = None, **options: Any
) -> str:
    options.setdefault("log_every", "4 steps")
    trainer = quiet(max_epochs=1, callbacks=[NonFiniteDetector(ignore)], **options)
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(task, data, validation)
    hooks = [each for module in task.modules() for each in (module._forward_hooks, module._forward_pre_hooks)]
    assert not any(hooks), "hooks are left"
    return str(caught.value)


def test_the_forward_that_broke_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "first in the forward of 'middle.1.1' (BreaksForward)."
    text = message(Deep(BreaksForward))
    assert text.startswith(f"NaN or infinite at step 3 on rank 0: 'loss' (from step 3); {where}")
    # A module whose outputs may be infinite, such as a mask, is left out.
    assert "first in the forward of 'middle.1.2' (Linear)" in message(Deep(BreaksForward), ignore=["mid*.1"])
    monkeypatch.setattr("drivetrain.callbacks.nonfinite_detector._KEPT", 2)
    with monkeypatch.context() as patch:  # a log point of a validation discards nothing
        patch.setattr(Deep, "validation_step", lambda self, batch: torch.zeros(()), raising=False)
        assert where in message(Deep(BreaksForward), validation=BATCHES, validate_every="1 steps")
    text = message(Deep(BreaksForward), log_every="8 steps")  # a long interval keeps the first bad place
    assert "at step 3 on rank 0" in text
    assert where in text


def test_the_backward_that_broke_is_named_although_its_loss_was_finite() -> None:
    text = message(Deep(BreaksBackward))
    assert "at step 4 " in text, "the loss is NaN one step later"
    assert "first in the backward of 'middle.1.1' (BreaksBackward), at step 3." in text


def test_a_batch_or_a_loss_that_broke_is_told_from_a_module() -> None:
    features = torch.randn(16, FEATURES)
    features[6, 1] = torch.nan
    data = [(features[i : i + 2], features[i : i + 2].sum(1, keepdim=True)) for i in range(0, 16, 2)]
    assert "first in batch 0 of the step's data" in message(Deep(None), data)
    assert "first in the gradient of the output of 'net.5' (Linear)" in message(Fragile(), batches(6, NAN))
    # Where a loss scale has skipped the step, and some before.
    text = message(Fragile(), batches(6), precision="16-mixed")
    assert "; first in the forward of 'net.0' (Linear)." in text


def test_the_module_is_named_with_skip_and_stop(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for choice in ("skip", "stop"):
        detect: dict[str, Any] = {"callbacks": [NonFiniteDetector()], "on_nonfinite": choice}
        trainer = quiet(max_epochs=1, log_every="4 steps", **detect)
        with caplog.at_level(logging.WARNING):
            found.append(trainer.fit(Fragile(), batches(6)).stop_reason)
    assert caplog.messages == [
        "step 3 was not made: NaN or infinite on rank 0: 'loss'; first in the forward of 'net.0' (Linear)"
    ]
    assert "'loss' (from step 3); first in the forward of 'net.0' (Linear); " in found[1]


def on_ranks(strategy: str) -> str:
    detect: dict[str, Any] = {"callbacks": [NonFiniteDetector()], "on_nonfinite": "stop"}
    trainer = quiet(max_epochs=1, log_every="4 steps", strategy=strategy, devices=2, **detect)
    return trainer.fit(Fragile(), batches(14)).stop_reason  # the second rank's in its fourth step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_of_several_ranks_the_one_that_broke_names_its_module(strategy: str) -> None:
    first, second = on_two_ranks(on_ranks, strategy)
    what = "NaN or infinite at step 3 on rank 1: 'loss' (from step 3)"
    assert first == second
    assert first.startswith(f"{what}; first in the forward of 'net.0' (Linear); ")
