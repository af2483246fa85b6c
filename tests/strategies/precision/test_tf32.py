"""TF32 holds while an engine lives, forward and backward, and is refused where there is none."""

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Engine, LambdaCallback, Throughput
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
    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "ieee"  # what a user has set is restored
    try:
        with Engine("cpu", Anywhere("tf32")):
            assert settings() == ALL
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before[0]
