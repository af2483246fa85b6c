"""Gradients averaged over processes, of which one may lack some."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from drivetrain.distributed.tensors import average_gradients
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def averaged() -> list[list[float] | None]:
    rank = int(os.environ["RANK"])
    both, one, none = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    both.grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    other.grad = torch.full((1,), 4.0 * rank, dtype=torch.float64)
    if rank == 0:
        one.grad = torch.tensor([6.0, 8.0])
    average_gradients([both, one, none, other], 2)
    return [None if each.grad is None else each.grad.tolist() for each in (both, one, none, other)]


def test_a_gradient_that_some_process_has_is_averaged_and_one_that_none_has_is_left_out() -> None:
    assert run_distributed(averaged) == [[[1.5, 3.0], [3.0, 4.0], None, [2.0]]] * 2
