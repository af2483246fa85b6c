"""Several copies of a model that learn as one: the options, and what is said when something does not fit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import ConfigError, StrategyError, TaskModule
from drivetrain.strategies.ddp import DDP, DDPConfig
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Partly(TaskModule):
    """Uses one of its two layers; which one, a batch decides if it is asked to."""

    def __init__(self, alternate: bool = False) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)
        self.alternate = alternate

    def training_step(self, batch: Tensor) -> Tensor:
        layer = self.idle if self.alternate and bool(batch[0, 0] > 2) else self.used
        loss: Tensor = layer(batch).square().mean()
        return loss


def fit(config: DDPConfig, alternate: bool) -> Any:
    data = [torch.full((4, 2), float(number)) for number in range(1, 5)]
    task = Partly(alternate)
    quiet(max_epochs=1, strategy=DDP(config, world_size=2), devices=2).fit(task, data)
    return [each.tolist() for each in task.parameters()]


def test_parameters_without_a_gradient_are_listed_by_name() -> None:
    with pytest.raises(RuntimeError) as caught:
        run_distributed(fit, DDPConfig(), False)
    text = str(caught.value)
    assert "the step used 2 of 4 trainable parameters" in text
    assert "no gradient: idle.weight, idle.bias. Freeze them" in text
    assert "DDPConfig(find_unused_parameters=True)" in text


def test_a_parameter_that_is_left_out_for_the_first_time_late_is_found_too() -> None:
    with pytest.raises(RuntimeError, match="of 4 trainable parameters"):
        run_distributed(fit, DDPConfig(), True)


@pytest.mark.parametrize("alternate", [False, True])
def test_steps_may_leave_parameters_out_when_that_is_asked_for(alternate: bool) -> None:
    first, second = run_distributed(fit, DDPConfig(find_unused_parameters=True), alternate)
    assert isinstance(first, list)
    assert first == second


class Running(TaskModule):
    """Running means are not the same on all ranks, unless they are given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append(self.norm.running_mean.tolist())  # type: ignore[union-attr]
        loss: Tensor = (self.norm(batch) - 1).square().mean()
        return loss


def means(config: DDPConfig) -> Any:
    data = [torch.randn(4, 2, generator=torch.Generator().manual_seed(each)) for each in range(6)]
    task = Running()
    quiet(max_epochs=1, strategy=DDP(config, world_size=2), devices=2).fit(task, data)
    return task.seen, task.norm.weight.tolist()


def test_buffers_are_those_of_rank_0_before_each_forward() -> None:
    first, second = run_distributed(means, DDPConfig())
    assert first == second
    (mine, _), (theirs, _) = run_distributed(means, DDPConfig(broadcast_buffers=False))
    assert mine != theirs


def start(_: int) -> Any:
    torch.manual_seed(int(os.environ["RANK"]))
    task = Regression()
    nn.init.normal_(task.line.weight)
    quiet(max_steps=1, strategy=DDP(world_size=2), devices=2).fit(task, pairs())
    return task.line.weight.tolist()


def test_all_ranks_begin_with_the_weights_of_rank_0() -> None:
    first, second = run_distributed(start, 0)
    assert first == second


def powered(config: DDPConfig) -> Any:
    task = Regression()
    quiet(max_epochs=4, strategy=DDP(config, world_size=2), devices=2).fit(task, pairs())
    return task.line.weight.tolist()


@pytest.mark.parametrize("hook", ["powersgd", "fp16"])
def test_gradients_can_be_sent_compressed(hook: str) -> None:
    first, second = run_distributed(powered, DDPConfig(communication=hook))
    assert first == second


def test_a_hook_of_ones_own_is_used_whatever_its_parameters_are_called() -> None:
    def silence(_: None, bucket_of_gradients: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.zeros_like(bucket_of_gradients.buffer()))
        return future

    first, _ = run_distributed(powered, DDPConfig(communication=silence))
    assert first == Regression().line.weight.tolist()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"communication": "fp8"}, "unknown communication 'fp8'.*fp16"),
        ({"communication": 3}, "must be a name or a hook, not 3"),
        ({"communication": len}, r"must take \(state, bucket\)"),
        ({"communication": lambda bucket: None}, r"must take \(state, bucket\)"),
        ({"bucket_mb": 0}, r"bucket_mb=...\) must be a positive number, not 0"),
        ({"timeout": -1}, r"timeout=...\) must be a positive number, not -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DDPConfig(**options)


@pytest.mark.parametrize("config", [DDPConfig(sync_batchnorm=True), DDPConfig(communication="bf16")])
def test_what_needs_gpus_is_refused_on_a_cpu(config: DDPConfig) -> None:
    with pytest.raises(StrategyError, match="needs GPUs"):
        DDP(config)


def test_every_precision_is_supported_on_a_cpu() -> None:
    for name in ("32", "64", "bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        assert DDP().supports(as_precision(name))


def test_another_number_of_processes_than_was_started_is_refused() -> None:
    def wrong(_: int) -> str:
        with pytest.raises(StrategyError) as caught:
            quiet(max_epochs=1, strategy=DDP(world_size=3), devices=3).fit(Regression(), pairs())
        return str(caught.value)

    for text in run_distributed(wrong, 0):
        assert "the process group has 2 processes, and this run asks for 3" in text


def counted(_: int) -> Any:
    seen = []

    def average(_: None, bucket: Any) -> Any:
        seen.append(float(bucket.buffer().abs().sum()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    config = DDPConfig(communication=average)
    quiet(max_steps=3, strategy=DDP(config, world_size=2), devices=2).fit(Regression(), pairs())
    return len(seen), min(seen) > 0


def test_a_hook_with_a_count_of_its_own_is_called_for_gradients_of_the_training_only() -> None:
    assert run_distributed(counted, 0) == [(3, True)] * 2
