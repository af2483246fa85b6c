"""How often the processes of a job talk to one another, and how much they say: counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.tasks import NextToken, Regression, pairs, quiet, ragged
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from drivetrain import Callback, OptimizerConfig
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Counting(Callback):
    """Counts the collectives of the updates from one to another, and the numbers that they carry."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.seen: Counter[str] = Counter()
        self.numbers = 0
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
                    self.seen[event.name.removeprefix("gloo:")] += 1
                    self.numbers += sum(torch.Size(shape).numel() for shape in event.input_shapes if shape)


def count(make: Any, data: Any, **options: Any) -> Any:
    counting = Counting(2, 6)
    world_size = torch.distributed.get_world_size()
    quiet(
        max_steps=8, strategy=DDP(world_size=world_size), devices=world_size, callbacks=[counting], **options
    ).fit(make(), data())
    return dict(counting.seen), counting.numbers


def many_pairs() -> Any:
    return pairs(100)


def sentences() -> Any:
    return DataLoader(ragged(100), batch_size=2)


def regression() -> Any:
    return Regression()


def next_token() -> Any:
    return NextToken(OptimizerConfig("sgd", lr=0.1))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_update_of_ddp_is_one_all_reduce_of_the_gradients(world_size: int, accumulation: int) -> None:
    options = {"log_every": "100 steps", "gradient_accumulation_steps": accumulation}
    size = sum(each.numel() for each in Regression().parameters())
    for seen, numbers in run_distributed(
        lambda: count(regression, many_pairs, **options), world_size=world_size
    ):
        assert seen == {"all_reduce": 4}
        assert numbers == 4 * size


def test_weights_of_the_tasks_own_take_one_more_of_three_numbers() -> None:
    size = sum(each.numel() for each in next_token().parameters())
    for seen, numbers in run_distributed(lambda: count(next_token, sentences, log_every="100 steps")):
        assert seen == {"all_reduce": 8}
        assert numbers == 4 * (size + 3)


def test_clipping_and_metrics_that_are_not_logged_yet_need_none() -> None:
    options = {"log_every": "100 steps", "max_grad_norm": 1.0}
    for seen, _ in run_distributed(lambda: count(regression, many_pairs, **options)):
        assert seen == {"all_reduce": 4}


def test_a_log_point_needs_the_same_few_whatever_it_logs() -> None:
    plain, _ = run_distributed(lambda: count(regression, many_pairs, log_every="100 steps"))[0]
    logged, _ = run_distributed(lambda: count(regression, many_pairs, log_every="2 steps"))[0]
    extra = Counter(logged)
    extra.subtract(plain)
    # One log point lies in between: the sizes, and what is gathered.
    assert dict(extra) == {"all_reduce": 0, "all_gather": 2}
