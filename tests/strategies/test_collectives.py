"""How often the processes of a job talk to one another, and how much they say: counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.tasks import NextToken, Regression, pairs, quiet, ragged
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from drivetrain import Callback, FSDPConfig, OptimizerConfig, TaskModule
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Counting(Callback):
    """Counts the collectives of the updates from one to another, and the numbers that they carry."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.seen: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        self._profile: Any = None

    def on_step_start(self, run: Any) -> None:
        if run.progress.updates == self.first:
            self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profile.__enter__()

    def on_step_end(self, run: Any) -> None:
        if run.progress.updates == self.last:
            self._profile.__exit__(None, None, None)
            for event in self._profile.events():
                if event.name.startswith("gloo:"):
                    kind = event.name.removeprefix("gloo:")
                    self.seen[kind] += 1
                    shapes = [shape for shape in event.input_shapes if shape]
                    self.numbers[kind] += sum(torch.Size(shape).numel() for shape in shapes)


def count(make: Any, data: Any, config: FSDPConfig | None = None, **options: Any) -> Any:
    counting = Counting(2, 6)
    world_size = torch.distributed.get_world_size()
    strategy = DDP(world_size=world_size) if config is None else FSDP(config, world_size=world_size)
    quiet(max_steps=8, strategy=strategy, devices=world_size, callbacks=[counting], **options).fit(
        make(), data()
    )
    return dict(counting.seen), dict(counting.numbers)


class Deep(TaskModule):
    """Three blocks and two more parts, whose weights can be divided by 2, 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 12, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12, bias=False), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(12, 12, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(features[:, :2])
        for block in self.blocks:
            made = block(made)
        return torch.Tensor(self.last(made))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs - batch[1]).square().mean()


def many_pairs() -> Any:
    return pairs(100)


def sentences() -> Any:
    return DataLoader(ragged(100), batch_size=2)


def regression() -> Any:
    return Regression()


def deep() -> Any:
    return Deep()


def next_token() -> Any:
    return NextToken(OptimizerConfig("sgd", lr=0.1))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_update_of_ddp_is_one_all_reduce_of_the_gradients(world_size: int, accumulation: int) -> None:
    options: dict[str, Any] = {"log_every": "100 steps", "gradient_accumulation_steps": accumulation}
    size = sum(each.numel() for each in Regression().parameters())
    for seen, numbers in run_distributed(
        lambda: count(regression, many_pairs, **options), world_size=world_size
    ):
        assert seen == {"all_reduce": 4}
        assert numbers["all_reduce"] == 4 * size


def test_weights_of_the_tasks_own_take_one_more_of_five_numbers() -> None:
    size = sum(each.numel() for each in next_token().parameters())
    for seen, numbers in run_distributed(lambda: count(next_token, sentences, log_every="100 steps")):
        assert seen == {"all_reduce": 8}
        assert numbers["all_reduce"] == 4 * (size + 5)


def test_clipping_and_metrics_that_are_not_logged_yet_need_none() -> None:
    options: dict[str, Any] = {"log_every": "100 steps", "max_grad_norm": 1.0}
    for seen, _ in run_distributed(lambda: count(regression, many_pairs, **options)):
        assert seen == {"all_reduce": 4}


def test_a_log_point_needs_the_same_few_whatever_it_logs() -> None:
    plain, _ = run_distributed(lambda: count(regression, many_pairs, log_every="100 steps"))[0]
    logged, _ = run_distributed(lambda: count(regression, many_pairs, log_every="2 steps"))[0]
    extra = Counter(logged)
    extra.subtract(plain)
    # One log point lies in between: the sizes, and what is gathered.
    assert dict(extra) == {"all_reduce": 0, "all_gather": 2}


BLOCK, REST = 12 * 12, 12 * 2 + 12 * 12
"""Weights of each of `Deep`'s blocks, and of all else."""


@pytest.mark.parametrize(
    ("sharding", "gathered"),
    [("full_shard", 2), ("shard_grad_op", 1)],  # once for forward, and again for backward if freed in between
)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_update_of_fsdp_gathers_and_reduces_each_part_once(
    world_size: int, sharding: str, gathered: int
) -> None:
    config = FSDPConfig(sharding=sharding)
    for seen, numbers in run_distributed(
        lambda: count(deep, many_pairs, config, log_every="100 steps"), world_size=world_size
    ):
        # gloo scatters what it has reduced in an all-reduce.
        assert seen == {"all_gather": 4 * (3 * gathered + 1), "all_reduce": 4 * 4}
        assert numbers["all_reduce"] == 4 * (3 * BLOCK + REST)
        assert numbers["all_gather"] * world_size == 4 * (3 * BLOCK * gathered + REST)


def test_copies_of_shards_are_reduced_once_more() -> None:
    config = FSDPConfig(sharding="hybrid", shard_size=2)
    for seen, numbers in run_distributed(
        lambda: count(deep, many_pairs, config, log_every="100 steps"), world_size=4
    ):
        assert seen == {"all_gather": 4 * 7, "all_reduce": 4 * 8}
        assert (
            numbers["all_reduce"] == 4 * (3 * BLOCK + REST) * 1.5
        )  # whole over the shards, a half over copies


def test_the_norm_of_shards_takes_one_more_of_a_number() -> None:
    config = FSDPConfig()
    options: dict[str, Any] = {"log_every": "100 steps", "max_grad_norm": 1.0}
    for seen, numbers in run_distributed(lambda: count(deep, many_pairs, config, **options)):
        assert seen == {"all_gather": 4 * 7, "all_reduce": 4 * 5}
        assert numbers["all_reduce"] == 4 * (3 * BLOCK + REST)  # the norm's has no dimension
