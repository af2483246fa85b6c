"""TF32 holds while an engine lives, forward and backward, and is refused where there is none."""

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Engine, LambdaCallback, Throughput
from drivetrain.strategies.precision.tf32 import PRECISION, TF32


class Anywhere(TF32):
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
    before, older = settings(), torch.get_float32_matmul_precision()

    def fail(run: Any) -> None:
        raise ValueError("out of luck")

    options = {"precision": Anywhere("tf32"), "callbacks": [LambdaCallback(on_step_end=fail)]}
    with pytest.raises(ValueError, match="out of luck"):
        quiet(max_epochs=1, **options).fit(Regression(), pairs())
    assert settings() == before
    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee"  # what a user has set is restored
    try:
        with Engine("cpu", Anywhere("tf32")):
            assert settings() == ALL
            assert torch.get_float32_matmul_precision() == "high", "as the compiler's autotuning asks for it"
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before[0]
    assert torch.get_float32_matmul_precision() == older


def test_tf32_is_refused_on_older_gpus_and_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, told in (((7, 5), "this is a Tesla T4; use '32' or '16-mixed'"), ((8, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert PRECISION.obstacle(cuda).endswith(told)
        assert bool(PRECISION.obstacle(cuda)) is bool(told)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD's" in PRECISION.obstacle(cuda)
