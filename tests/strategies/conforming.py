"""Checks of the conformance suite on the pool of two ranks."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.strategies.decisions import DECISIONS
from tests.support.ranks import on_two_ranks

from drivetrain.strategies import Strategy
from drivetrain.testing import run_distributed
from drivetrain.testing.strategies.check import CHECKS
from drivetrain.testing.strategies.job import Job
from drivetrain.testing.strategies.tasks import Tokens

MakeStrategy = Callable[[int], Strategy]


def steps(job: Job) -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.3, "max_epochs": 1}
    alone = job.fit(True, Tokens("sgd", schedule="cosine"), job.sequences(True), **options)
    data = job.sequences(False, 2)
    found = job.fit(False, Tokens("sgd", schedule="cosine"), data, gradient_accumulation_steps=2, **options)
    job.assert_equals_one_process(found.weights, alone.weights, "the weights")
    job.assert_equals_one_process(found.record.norms, alone.record.norms, "the gradient's norm")
    job.assert_equals_one_process(found.result.metrics, alone.result.metrics, "the metrics")


def conforms(make: MakeStrategy, *checks: str, precision: str = "32", tolerance: float = 1e-6) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        on_two_ranks(_checked, make, scratch, checks, precision, tolerance)


def _checked(make: MakeStrategy, scratch: str, checks: Any, precision: str, tolerance: float) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for name in checks:
        check = {"steps": steps, **CHECKS, **DECISIONS}[name]
        check(Job(make, rank, size, Path(scratch), precision, tolerance))


def refused(function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> str:
    with pytest.raises(RuntimeError) as caught:
        run_distributed(function, *arguments, world_size=world_size)
    return str(caught.value)
