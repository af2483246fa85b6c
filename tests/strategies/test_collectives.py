"""How often the processes of a job talk to one another, and how much they say: counted, not timed."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Blocks, NextToken, Regression, pairs, quiet, ragged
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from drivetrain import Callback, FSDPConfig, OptimizerConfig
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Counting(Callback):  # collectives of some steps, and their numbers
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.seen: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        self._profile: Any = None

    def on_step_start(self, run: Any) -> None:
        if run.progress.steps == self.first:
            self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profile.__enter__()

    def on_step_end(self, run: Any) -> None:
        if run.progress.steps == self.last:
            self._profile.__exit__(None, None, None)
            for event in self._profile.events():
                if event.name.startswith("gloo:"):
                    kind = event.name.removeprefix("gloo:")
                    self.seen[kind] += 1
                    shapes = [shape for shape in event.input_shapes if shape]
                    self.numbers[kind] += sum(torch.Size(shape).numel() for shape in shapes)


def count(make: Any, data: Any, config: FSDPConfig | None = None, **options: Any) -> Any:  # of two steps
    counting = Counting(2, 4)
    strategy = DDP(world_size=2) if config is None else FSDP(config, world_size=2)
    options = {"max_steps": 4, "log_every": "100 steps", "callbacks": [counting], **options}
    quiet(strategy=strategy, devices=2, **options).fit(make(), data)
    return dict(counting.seen), dict(counting.numbers)


def next_token() -> NextToken:
    return NextToken(OptimizerConfig("sgd", lr=0.1))


def size(task: nn.Module) -> int:
    return sum(each.numel() for each in task.parameters())


def test_ddp_step_is_one_all_reduce_of_the_gradients() -> None:
    def counts() -> dict[str, Any]:
        sentences = DataLoader(ragged(100), batch_size=2)  # type: ignore[arg-type, var-annotated]
        return {
            "plain": count(Regression, pairs(100)),
            "accumulated": count(Regression, pairs(100), gradient_accumulation_steps=3),
            "clipped": count(Regression, pairs(100), max_grad_norm=1.0),
            "weighted": count(next_token, sentences),
            "logged": count(Regression, pairs(100), log_every="3 steps"),
        }

    for found in on_two_ranks(counts):
        for name in ("plain", "accumulated", "clipped"):
            assert found[name] == ({"all_reduce": 2}, {"all_reduce": 2 * size(Regression())}), name
        # A task's own weights take one more, of five numbers.
        assert found["weighted"] == ({"all_reduce": 4}, {"all_reduce": 2 * (size(next_token()) + 5)})
        # A log point in between needs one, for what is short.
        assert found["logged"][0] == {"all_reduce": 2, "all_gather": 1}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12, bias=False), nn.Tanh())


def deep() -> Blocks:
    task = Blocks(block, 12, OptimizerConfig("sgd", lr=0.1))
    task.head = nn.Linear(12, 12, bias=False)
    return task


PART = 12 * 12
"""Weights of each of the four parts of `deep()`."""


def count_fsdp(sharding: str, **options: Any) -> Any:
    return count(deep, list(torch.randn(50, 2, 12)), FSDPConfig(sharding=sharding), **options)


def assert_gathered_once(found: Any, times: int, clipped: bool = False) -> None:  # the head once
    # gloo scatters what it has reduced in an all-reduce; a norm takes one more, without dimensions.
    seen, numbers = found
    assert seen == {"all_gather": 2 * (3 * times + 1), "all_reduce": 2 * (4 + clipped)}
    assert numbers["all_reduce"] == 2 * 4 * PART
    assert numbers["all_gather"] * 2 == 2 * (3 * times + 1) * PART


def test_fsdp_step_gathers_and_reduces_each_part_once() -> None:
    def counts() -> list[Any]:
        accumulated = count_fsdp("shard_grad_op", gradient_accumulation_steps=2)
        return [count_fsdp("full_shard", max_grad_norm=1.0), count_fsdp("shard_grad_op"), accumulated]

    for full, grad_op, (_, numbers) in on_two_ranks(counts):
        assert numbers["all_reduce"] == 2 * 4 * PART, "once in a step"
        # For forward, and again for backward because it was freed in between.
        assert_gathered_once(full, 2, clipped=True)
        assert_gathered_once(grad_op, 1)
