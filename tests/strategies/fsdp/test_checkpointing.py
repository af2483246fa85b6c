"""Computing activations again changes no number; what is computed again is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.counting import Counting
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from drivetrain import FSDPConfig, TaskModule
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

BLOCKS = 3


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))


class Deep(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss


def keep_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation == torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def trained(again: Any) -> tuple[dict[str, list[Any]], int, int]:
    """The weights after three updates, and how often a block's parts were computed in each."""
    world_size = torch.distributed.get_world_size()
    task, strategy = Deep(), FSDP(FSDPConfig(activation_checkpointing=again), world_size=world_size)
    data = [torch.arange(8.0).reshape(2, 4) + number for number in range(3 * world_size)]
    with Counting() as counting:
        quiet(max_epochs=1, strategy=strategy, devices=world_size).fit(task, data)
    state: dict[str, Any] = task.state_dict()
    weights = {name: each.tolist() for name, each in state.items()}
    return weights, counting.seen["addmm"] // BLOCKS, counting.seen["tanh"] // BLOCKS


@pytest.mark.parametrize(
    ("again", "products", "cheap"),
    [("full", 6, 6), ("selective", 3, 6), (("Block",), 6, 6), (keep_tanh, 6, 3)],
    ids=["full", "selective", "classes", "policy"],
)
def test_only_what_is_not_kept_is_computed_again_and_no_bit_changes(
    again: Any, products: int, cheap: int
) -> None:
    expected = run_distributed(trained, False)
    assert [each[1:] for each in expected] == [(3, 3)] * 2
    for (weights, *counts), (plain, *_) in zip(run_distributed(trained, again), expected, strict=True):
        assert weights == plain
        assert counts == [products, cheap]
