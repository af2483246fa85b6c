"""Every precision under every strategy conforms, or is refused when the Trainer is made, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # here and not in each of the processes, which are copies of this one
import torch.distributed.fsdp
import torchmetrics  # noqa: F401  for the same reason

from drivetrain import StrategyError
from drivetrain.core.registry import is_installed
from drivetrain.strategies import SingleDevice, Strategy, select_strategy
from drivetrain.strategies.accelerate.strategy import Accelerate
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import PRECISIONS, as_precision
from drivetrain.testing.strategies.check import check_strategy
from drivetrain.testing.strategies.resume import check_resume

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

TOLERANCES = {
    "32": 1e-6,
    "64": 1e-12,
    "bf16-mixed": 5e-3,
    "16-mixed": 5e-4,
    "bf16-true": 0.1,
    "bf16-true-master": 1e-2,
    "bf16-true-nearest": 1e-2,
    "16-true": 2e-2,
    "16-true-master": 5e-3,
    "16-true-nearest": 5e-3,
}
"""In 16 bits the sums over a batch and over its parts are rounded in different places. Rounding at random
draws other numbers for each layout of the shards."""

REFUSED = {
    **{(name, "tf32"): "TF32 needs an NVIDIA GPU" for name in MAKERS},
    **{(name, "fp8"): "products in float8 need an NVIDIA GPU" for name in MAKERS},
    ("accelerate", "16-mixed"): "accelerate has no fp16 on CPUs",
}
"""On CPUs. Float8 is emulated there if it is asked to be; see test_precision_float8."""

WHOLE = ("32", "64", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
"""What is held to more than the updates and their resume: the first of those that differ in updates alone."""

FIRST = {
    "32": "accelerate",
    "64": "fsdp",
    "bf16-mixed": "fsdp",
    "16-mixed": "ddp",
    "bf16-true": "fsdp",
    "bf16-true-master": "ddp",
    "bf16-true-nearest": "single",
    "16-true": "ddp",
    "16-true-master": "single",
    "16-true-nearest": "fsdp",
}
"""The strategy of each precision in the default tier; what else is not refused is in the full one."""


def pair(strategy: str, precision: str) -> Any:
    is_quick = (strategy, precision) in REFUSED or FIRST[precision] == strategy
    return pytest.param(strategy, precision, marks=() if is_quick else pytest.mark.full)


PAIRS = [pair(strategy, precision) for strategy in MAKERS for precision in sorted(PRECISIONS)]


@pytest.mark.parametrize(("strategy", "precision"), PAIRS)
def test_a_pair_conforms_or_is_refused_with_the_reason(strategy: str, precision: str) -> None:
    make = MAKERS[strategy]
    if (strategy, precision) in REFUSED:
        with pytest.raises(
            StrategyError, match=f"{precision!r} cannot run on cpu: {REFUSED[strategy, precision]}"
        ):
            select_strategy(make(1), as_precision(precision))
        return
    checks = ["same_as_the_big_batch", "resume_is_bitwise"]
    if precision in WHOLE and strategy in ("ddp", "fsdp"):
        checks += ["generator_steps", "each_rank_draws_for_itself", "all_ranks_see_the_same"]
    size = 1 if strategy == "single" else 2
    check_strategy(make, size, checks=checks, precision=precision, tolerance=TOLERANCES[precision])


@pytest.mark.full
def test_kept_copies_go_from_and_to_every_strategy_and_number_of_processes() -> None:
    makers: dict[str, Any] = {
        "single": MAKERS["single"],
        "ddp": lambda world_size: DDP(world_size=2),
        "fsdp": lambda world_size: FSDP(world_size=2),
    }
    assert check_resume(makers, (1, 2), precision="bf16-true-master", tolerance=1e-2) == 9
