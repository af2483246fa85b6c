"""TF32 holds while an engine lives, forward and backward, and is refused where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Engine, StrategyError, Trainer
from drivetrain.callbacks import Callback, LambdaCallback
from drivetrain.callbacks.statistics.throughput import Throughput
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


class Seen(Callback):
    """The settings at each update, and in its backward."""

    def __init__(self) -> None:
        self.settings: list[tuple[str, str, str]] = []

    def on_fit_start(self, run: Any) -> None:
        run.task.line.weight.register_hook(lambda gradient: self.settings.append(settings()))

    def on_step_end(self, run: Any) -> None:
        self.settings.append(settings())


def test_it_holds_for_forward_and_backward_of_a_run_and_no_longer() -> None:
    before = settings()
    assert before != ALL
    seen = Seen()
    trainer = quiet(precision=Anywhere("tf32"), max_epochs=1, callbacks=[seen, Throughput()])
    assert settings() == before, "making a Trainer sets nothing"
    trainer.fit(Regression(), pairs())
    assert seen.settings == [ALL] * 10
    assert settings() == before
    trainer.validate(Regression(), pairs())
    assert settings() == before


def test_it_ends_with_a_run_that_fails_and_with_an_engine_of_one_s_own() -> None:
    before = settings()

    def fail(run: Any) -> None:
        raise ValueError("out of luck")

    failing = LambdaCallback(on_step_end=fail)
    trainer = quiet(precision=Anywhere("tf32"), max_epochs=1, callbacks=[failing])
    with pytest.raises(ValueError, match="out of luck"):
        trainer.fit(Regression(), pairs())
    assert settings() == before
    with Engine("cpu", Anywhere("tf32")):
        assert settings() == ALL
    assert settings() == before


def test_what_a_user_has_set_is_restored() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        with Engine("cpu", Anywhere("tf32")):
            assert settings() == ALL
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    "make", [lambda: Trainer(strategy="cpu", precision="tf32"), lambda: Engine("cpu", "tf32")]
)
def test_a_device_without_it_is_refused_when_the_trainer_is_made(make: Any) -> None:
    before = settings()
    with pytest.raises(
        StrategyError, match=r"cannot run on cpu: TF32 needs an NVIDIA GPU.*use '32' or 'bf16-mixed'"
    ):
        make()
    assert settings() == before


def test_older_gpus_and_those_of_others_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    precision, cuda = as_precision("tf32"), torch.device("cuda", 0)
    assert "the device is 'mps'" in precision.obstacle(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert precision.obstacle(cuda) == (
        "TF32 needs an NVIDIA GPU since Ampere, and this is a Tesla T4; use '32' or '16-mixed'"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert precision.obstacle(cuda) == ""
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD's" in precision.obstacle(cuda)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_are_rounded_to_tf32_forward_and_backward() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))

    def products() -> list[torch.Tensor]:
        first = left.cuda().requires_grad_()
        made = first @ right.cuda()
        made.backward(right.cuda())
        assert first.grad is not None
        return [made.detach().cpu(), first.grad.cpu()]

    exact = [left.double() @ right.double(), right.double() @ right.double().T]
    with Engine("cuda", "32"):
        plain = products()
    with Engine("cuda", "tf32"):
        rounded = products()
    for mine, less, reference in zip(plain, rounded, exact, strict=True):
        assert (mine - reference).abs().mean() < 1e-4
        assert (less - reference).abs().mean() > 1e-3
