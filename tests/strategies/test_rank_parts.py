"""Ranks that run different blocks or use different parameters are refused by name; nothing is saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from torch import Tensor, nn

from drivetrain import FSDPConfig, TaskModule
from drivetrain.core.errors import StrategyError
from drivetrain.strategies import select_precision
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.task.task import StepModule

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Parts(TaskModule):  # runs the blocks with these numbers
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))

    def forward(self, numbers: list[int]) -> Tensor:
        x = torch.ones(1, 2)
        for number in numbers:
            x = x + self.blocks[number](x)
        return x.sum()


def refused(
    strategy: Any, steps: list[tuple[list[int], list[int]]], train: bool = True, update: bool = False
) -> str:
    strategy.setup()
    try:
        module = StepModule(Parts())
        module.use(module.task)
        make: Callable[..., Any] = lambda of: {"default": torch.optim.SGD(of.parameters(), lr=0.1)}  # noqa: E731
        prepared = strategy.prepare(module, make, select_precision("32"))
        model = prepared.model
        for number, each in enumerate(steps):
            strategy.microbatch(model, number % 2 == 1)
            with torch.set_grad_enabled(train):
                loss = model(each[strategy.rank])
            if train:
                strategy.backward(loss)
            if update and number % 2 == 1:
                strategy.optimizer_step(prepared.optimizer)
            strategy.ranks.all_gather(None)
    except StrategyError as error:
        return str(error).partition(": ")[2].partition(". ")[0]
    finally:
        strategy.teardown()
    return ""


def parts() -> list[str]:
    def fsdp(*steps: tuple[list[int], list[int]], train: bool = True, **options: Any) -> str:
        return refused(FSDP(FSDPConfig(**options), world_size=2), [*steps], train)

    every = [0, 1, 2]  # as many gathers on each rank in what follows: otherwise they wait for ever
    return [
        fsdp((every, every), ([0, 2], [0, 2]), (every, every), ([2, 1], [2, 1])),
        fsdp(([0, 2], [0, 1]), backward_prefetch=0),
        fsdp((every, every), ([0, 2], [2, 0]), train=False),
        fsdp(([0, 1], every), (every, [0, 1]), wrap=()),  # the window has used the same
        fsdp(([0, 1], [0, 2]), ([0, 1], [0, 2]), wrap=()),
        fsdp(([0, 1], [0, 2]), ([0, 1], [0, 2]), wrap=(), sharding="no_shard"),
        fsdp((every, every), ([0, 1], [0, 2]), wrap=(), reduce_each_micro_batch=True),
    ]


def test_fsdp_refuses_ranks_that_run_different_parts() -> None:
    first, second = on_two_ranks(parts)
    lacking = "rank 0 has no gradient of 'blocks.2.0.weight'; rank 1 has no gradient of 'blocks.1.0.weight'"
    assert first == second
    assert first == [
        "",
        "rank 0 runs 'blocks.2'; rank 1 runs 'blocks.1'",
        "rank 0 runs 'blocks.0'; rank 1 runs 'blocks.2'",
        "",
        lacking,
        lacking,
        lacking,
    ]
