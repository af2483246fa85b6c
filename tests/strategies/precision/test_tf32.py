"""TF32 holds while an engine lives, forward and backward, and is refused where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Engine, LambdaCallback, StrategyError, Throughput
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.precision.tf32 import TF32


class Anywhere(TF32):
    """The same where there is no such hardware: the settings can be seen all the same."""

    def obstacle(self, device: torch.device) -> str:
        return ""


def settings() -> tuple[str, str, str]:
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision


ALL = ("tf32", "tf32", "tf32")


def test_tf32_holds_for_forward_and_backward_of_a_run_and_no_longer() -> None:
    before, seen = settings(), []
    assert before != ALL

    def watch(run: Any) -> None:
        run.task.line.weight.register_hook(lambda gradient: seen.append(settings()))

    look = LambdaCallback(on_fit_start=watch, on_step_end=lambda run: seen.append(settings()))
    trainer = quiet(precision=Anywhere("tf32"), max_epochs=1, callbacks=[look, Throughput()])
    assert settings() == before, "making a Trainer sets nothing"
    trainer.fit(Regression(), pairs())
    assert seen == [ALL] * 10
    assert settings() == before
    trainer.validate(Regression(), pairs())
    assert settings() == before


def test_tf32_ends_with_a_run_that_fails_and_with_an_engine() -> None:
    before = settings()

    def fail(run: Any) -> None:
        raise ValueError("out of luck")

    options = {"precision": Anywhere("tf32"), "callbacks": [LambdaCallback(on_step_end=fail)]}
    with pytest.raises(ValueError, match="out of luck"):
        quiet(max_epochs=1, **options).fit(Regression(), pairs())
    assert settings() == before
    with pytest.raises(StrategyError, match="TF32 needs an NVIDIA GPU"):
        Engine("cpu", "tf32")
    assert settings() == before
    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee"  # what a user has set is restored
    try:
        with Engine("cpu", Anywhere("tf32")):
            assert settings() == ALL
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before[0]


def test_tf32_is_refused_on_older_gpus_and_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    precision, cuda = as_precision("tf32"), torch.device("cuda", 0)
    assert "the device is 'mps'" in precision.obstacle(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert "since Ampere, and this is a Tesla T4; use '32' or '16-mixed'" in precision.obstacle(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert precision.obstacle(cuda) == ""
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD's" in precision.obstacle(cuda)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tf32_rounds_products_forward_and_backward() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))

    def products(precision: str) -> list[torch.Tensor]:
        with Engine("cuda", precision):
            first = left.cuda().requires_grad_()
            made = first @ right.cuda()
            made.backward(right.cuda())
            assert first.grad is not None
            return [made.detach().cpu(), first.grad.cpu()]

    exact = [left.double() @ right.double(), right.double() @ right.double().T]
    for mine, less, reference in zip(products("32"), products("tf32"), exact, strict=True):
        assert (mine - reference).abs().mean() < 1e-4
        assert (less - reference).abs().mean() > 1e-3
