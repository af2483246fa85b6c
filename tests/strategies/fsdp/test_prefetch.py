"""Blocks gathered ahead of their turn: how many, and which."""

from __future__ import annotations

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drivetrain import FSDPConfig, TaskModule
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Deep(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss


def gathered(forward: int, backward: int) -> list[str]:
    """What was gathered ahead in an update, in order."""
    config = FSDPConfig(forward_prefetch=forward, backward_prefetch=backward)
    strategy = FSDP(config, world_size=2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        quiet(max_steps=1, strategy=strategy, devices=2).fit(Deep(), [torch.ones(2, 4)] * 2)
    names = [each.name.removeprefix("FSDP::") for each in seen.events() if "prefetch for" in each.name]
    return [each.replace("_prefetch for task.blocks.", " ") for each in names]


@pytest.mark.parametrize("backward", [0, 1])
def test_backward_gathers_one_block_ahead_by_itself(backward: int) -> None:
    assert run_distributed(gathered, 0, backward)[0] == [
        "backward 2",
        "backward 1",
        "backward 0",
    ]


def test_more_blocks_are_gathered_ahead_when_asked_for() -> None:
    ahead = ["forward 1", "forward 2", "forward 2", "forward 3", "forward 3"]
    back = ["backward 2", "backward 1", "backward 1", "backward 0", "backward 0"]
    assert run_distributed(gathered, 2, 2)[0] == ahead + back
