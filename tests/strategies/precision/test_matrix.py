"""Every precision under every strategy conforms, or is refused when the Trainer is made, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.conforming import conforms
from tests.strategies.resuming import check_resume
from tests.support.refusals import assert_refused

from drivetrain import StrategyError
from drivetrain.core.registry import is_installed
from drivetrain.strategies import SingleDevice, Strategy, select_strategy
from drivetrain.strategies.accelerate.accelerate import Accelerate
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.testing.strategies.check import check_strategy

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(not is_installed("accelerate"), reason="needs accelerate"),
]

MAKERS: dict[str, Callable[[int], Strategy]] = {
    "single": lambda world_size: SingleDevice("cpu"),
    "ddp": lambda world_size: DDP(world_size=world_size),
    "fsdp": lambda world_size: FSDP(world_size=world_size),
    "accelerate": lambda world_size: Accelerate(world_size=world_size),
}

TOLERANCES = {"32": 1e-6, "64": 1e-12, "bf16-mixed": 5e-3, "16-mixed": 5e-4}
TOLERANCES |= {"bf16-true": 0.1, "bf16-true-master": 1e-2, "bf16-true-nearest": 1e-2}
TOLERANCES |= {"16-true": 2e-2, "16-true-master": 5e-3, "16-true-nearest": 5e-3}
"""In 16 bits the sums over a batch and over its parts are rounded in different places. Rounding at random
draws other numbers for each layout of the shards."""

ONE_EACH = {"ddp": ("64", "16-mixed", "bf16-true-master")}
ONE_EACH["fsdp"] = ("bf16-mixed", "bf16-true", "16-true-nearest")
"""The cells of the quick tier; test_ddp_conforms and its like have "32"."""


@pytest.mark.parametrize("strategy", ONE_EACH)
def test_precision_on_two_ranks_is_that_of_one_process(strategy: str) -> None:
    for precision in ONE_EACH[strategy]:
        conforms(MAKERS[strategy], "steps", precision=precision, tolerance=TOLERANCES[precision])


def test_precisions_without_hardware_are_refused_by_each_strategy() -> None:
    cases: dict[str, Any] = {}
    for name, make in MAKERS.items():
        for precision, reason in {
            "tf32": "TF32 needs an NVIDIA GPU",
            "fp8": "products in float8 need an NVIDIA GPU",  # emulated where asked for: test_float8
            **({"16-mixed": "accelerate has no fp16 on CPUs"} if name == "accelerate" else {}),
        }.items():
            call = lambda make=make, precision=precision: select_strategy(make(1), as_precision(precision))  # noqa: E731
            cases[f"{name}, {precision}"] = (call, f"{precision!r} cannot run on cpu: {reason}")
    assert_refused(StrategyError, cases)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", TOLERANCES)
def test_precision_conforms_under_every_strategy(precision: str) -> None:
    for strategy, make in MAKERS.items():
        if (strategy, precision) == ("accelerate", "16-mixed"):
            continue
        checks = ["same_as_the_big_batch", "resume_is_bitwise"]
        if strategy in ("ddp", "fsdp") and not precision.endswith(("-master", "-nearest")):
            checks += ["generator_steps", "each_rank_draws_for_itself", "all_ranks_see_the_same"]
        size = 1 if strategy == "single" else 2
        check_strategy(make, size, checks=checks, precision=precision, tolerance=TOLERANCES[precision])


@pytest.mark.nightly
def test_master_weights_are_resumed_by_every_strategy_and_number_of_processes() -> None:
    makers: dict[str, Any] = {
        "single": MAKERS["single"],
        "ddp": lambda world_size: DDP(world_size=2),
        "fsdp": lambda world_size: FSDP(world_size=2),
    }
    assert check_resume(makers, (1, 2), precision="bf16-true-master", tolerance=1e-2) == 9
