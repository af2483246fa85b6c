"""Muon looks at whole matrices, also where processes keep parts of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import FSDPConfig, OptimizerConfig, TaskModule
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Matrices(TaskModule):
    """One that is wide, one that is high, and rows that do not go into the processes evenly."""

    def __init__(self, nesterov: bool = True) -> None:
        super().__init__()
        self.nesterov = nesterov
        torch.manual_seed(0)
        self.wide, self.high, self.odd = nn.Linear(6, 10), nn.Linear(10, 4), nn.Linear(4, 3, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.odd(torch.tanh(self.high(torch.tanh(self.wide(features)))))
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("muon", lr=0.02, weight_decay=0.1, nesterov=self.nesterov)

    def parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"wide": ColwiseParallel(), "high": RowwiseParallel()}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    features, targets = torch.randn(16, 4, 6, generator=generator), torch.randn(16, 4, 3, generator=generator)
    return list(zip(features, targets, strict=True))


def trained(strategy: Any, nesterov: bool, parts: int = 1) -> dict[str, list[Any]]:
    task = Matrices(nesterov)
    quiet(
        max_steps=4,
        strategy=strategy,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=4 // parts,
    ).fit(task, batches())
    return {name: each.tolist() for name, each in task.state_dict().items()}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("config", "world_size", "parts"),
    [
        (FSDPConfig(), 2, 2),
        (FSDPConfig(), 4, 4),
        (FSDPConfig(sharding="hybrid", shard_size=2), 4, 4),
        (FSDPConfig(tensor_parallel=2), 2, 1),
        (FSDPConfig(tensor_parallel=2), 4, 2),
    ],
    ids=["two", "four", "replicated", "split", "split and sharded"],
)
def test_sharded_matrices_are_trained_as_whole_ones(
    config: FSDPConfig, world_size: int, parts: int, nesterov: bool
) -> None:
    alone = trained("single", nesterov)
    for found in run_distributed(trained, config, nesterov, parts, world_size=world_size):
        for name, value in alone.items():
            # It is done in bfloat16, in which a rounding is 0.4 % of an update of 0.01.
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=0, atol=2e-4)
