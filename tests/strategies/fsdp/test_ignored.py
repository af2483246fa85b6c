"""Parameters that every process keeps whole: the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import nn

from drivetrain import Callback, ConfigError, FSDPConfig, OptimizerConfig
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.wrapping import ignored_names
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.check import check_strategy
from drivetrain.testing.strategies.tasks import Tokens

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

STEPS = ["same_as_the_big_batch", "frozen_and_tied", "resume_is_bitwise"]


def keeping(*ignored: str, **options: Any) -> Any:
    return lambda world_size: FSDP(FSDPConfig(ignored=ignored, **options), world_size=world_size)


@pytest.mark.parametrize(
    "ignored",
    [
        ("blocks.1", "*.bias"),
        *(pytest.param(each, marks=pytest.mark.full) for each in (("head",), ("embedding.weight",), ("*",))),
    ],
    ids=",".join,
)
def test_ignored_parameters_conform(ignored: tuple[str, ...]) -> None:
    check_strategy(keeping(*ignored), checks=[*STEPS, "resume_on_another_number_of_processes"])


def test_they_conform_under_a_loss_scale() -> None:
    check_strategy(keeping("blocks.1"), checks=STEPS, precision="16-mixed", tolerance=0.05)


def test_the_gradients_of_a_generator_step_are_averaged_too() -> None:
    check_strategy(keeping("discriminator", "generator.bias"), checks=["generator_steps"])


class Look(Callback):
    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}

    def on_step_end(self, run: Any) -> None:
        self.kinds = {name: type(each).__name__ for name, each in run.task.named_parameters()}


class Scaled(Regression):
    """Has a scalar, which cannot be sharded."""

    def __init__(self, fused: bool | None = None) -> None:
        super().__init__(OptimizerConfig("adamw", lr=0.1, fused=fused))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(features)


def kept(*ignored: str) -> tuple[dict[str, str], float]:
    look, task = Look(), Scaled()
    strategy = keeping(*ignored)(2)
    quiet(max_epochs=1, strategy=strategy, devices=2, max_grad_norm=0.1, callbacks=[look]).fit(task, pairs())
    return look.kinds, task.scale.item()


@pytest.mark.parametrize("ignored", [(), ("line.bias",)])
def test_scalars_and_ignored_parameters_are_plain_and_stay_the_same_on_all(ignored: tuple[str, ...]) -> None:
    (kinds, first), (_, second) = run_distributed(kept, *ignored)
    bias = "Parameter" if ignored else "DTensor"
    assert kinds == {"line.weight": "DTensor", "line.bias": bias, "scale": "Parameter"}
    assert first == second != 2.0


def refused() -> None:
    quiet(max_steps=1, strategy=keeping("scale")(2), devices=2).fit(Scaled(fused=True), pairs())


def test_a_fused_step_of_both_kinds_is_refused_when_asked_for() -> None:
    with pytest.raises(RuntimeError, match="for sharded and whole parameters"):
        run_distributed(refused)


def test_names_and_globs_of_parameters_and_modules_are_found() -> None:
    task = Tokens()
    assert ignored_names(task, ("head", "embedding.weight")) == {"head.weight", "embedding.weight"}
    assert ignored_names(task, ("blocks.?.0",)) == {
        f"blocks.{n}.0.{w}" for n in range(3) for w in ("weight", "bias")
    }
    assert ignored_names(task, ("*.bias",)) == {f"blocks.{n}.0.bias" for n in range(3)}
    with pytest.raises(ConfigError, match=r"ignored='heda' matches no parameter.*Did you mean 'head'"):
        ignored_names(task, ("head", "heda"))
