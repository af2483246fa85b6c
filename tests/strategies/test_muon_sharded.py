"""Muon looks at whole matrices, also where processes keep parts of them."""

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import FSDPConfig, OptimizerConfig, TaskModule
from drivetrain.strategies import SingleDevice
from drivetrain.task.model_info import ModelInfo
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Matrices(TaskModule):
    def __init__(self, nesterov: bool = True) -> None:
        super().__init__()
        self.nesterov = nesterov
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))  # a stack, which two ranks divide unequally
        self.wide, self.high, self.odd = nn.Linear(6, 10), nn.Linear(10, 4), nn.Linear(4, 3, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.high(torch.tanh(self.wide(features))))
        mixed = torch.einsum("bf,nfh->nbh", features, self.experts).tanh().mean(0)
        outputs: Tensor = self.odd(hidden + mixed)
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        options = {"nesterov": self.nesterov, "stacks": "experts", "cautious_decay": self.nesterov}
        return OptimizerConfig("muon", lr=0.02, weight_decay=0.1, **options)

    def model_info(self) -> ModelInfo:
        return ModelInfo(parallel_plan=self.planned())

    def planned(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"wide": ColwiseParallel(), "high": RowwiseParallel()}


def trained(strategy: Any, nesterov: bool, parts: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features, targets = torch.randn(16, 4, 6, generator=generator), torch.randn(16, 4, 3, generator=generator)
    devices = 1 if isinstance(strategy, SingleDevice) else torch.distributed.get_world_size()
    task = Matrices(nesterov)
    trainer = quiet(max_steps=4, strategy=strategy, devices=devices, gradient_accumulation_steps=4 // parts)
    trainer.fit(task, list(zip(features, targets, strict=True)))
    return {name: each.detach() for name, each in task.state_dict().items()}


def compare(parts: int, nesterov: bool, **options: Any) -> None:
    alone = trained(SingleDevice("cpu"), nesterov)
    found = trained(FSDPConfig(**options), nesterov, parts)
    for name, value in alone.items():
        # It is done in bfloat16, in which a rounding is 0.4 % of a step of 0.01.
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-4, msg=f"{options}: {name}")


def test_muon_trains_sharded_and_split_matrices_as_whole_ones() -> None:
    def both() -> None:
        compare(2, nesterov=True)
        compare(1, nesterov=False, tensor_parallel=2)

    on_two_ranks(both)


@pytest.mark.nightly
def test_muon_trains_matrices_in_shards_of_four_ranks_as_whole_ones() -> None:
    def all_of() -> None:
        compare(4, nesterov=True, sharding="hybrid", shard_size=2)
        compare(2, nesterov=True, tensor_parallel=2)

    run_distributed(all_of, world_size=4)
