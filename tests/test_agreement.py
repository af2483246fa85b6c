"""What ranks must have alike is compared before they exchange anything; buffers are the same on all."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import (
    Callback,
    ConfigError,
    DDPConfig,
    FSDPConfig,
    StrategyError,
    TaskModule,
)
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def strategy(kind: str) -> Any:
    return (DDP if kind == "ddp" else FSDP)(world_size=2)


def refused(kind: str, what: str) -> None:
    """A fit whose rank 1 is different."""
    rank = int(os.environ["RANK"])
    options: dict[str, Any] = {"max_epochs": 1}
    task: Any = Regression()
    if what == "checkpoint":
        options["checkpoint"] = rank == 0
    elif what == "seed":
        options["seed"] = rank
    elif what == "shape" and rank:
        task.line = nn.Linear(3, 2)
    elif what == "frozen" and rank:
        next(task.parameters()).requires_grad_(False)
    elif what == "more" and rank:
        task.late = nn.Linear(2, 2)
    quiet(strategy=strategy(kind), devices=2, **options).fit(task, pairs(8))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("checkpoint", "different Trainers: checkpoint is True on rank 0 and False on rank 1"),
        ("seed", "different Trainers: seed is 0 on rank 0 and 1 on rank 1"),
        ("shape", "different tasks: rank 0 has 'line.weight' of shape"),
        ("frozen", "(torch.float32, frozen). Make the same task on all"),
        ("more", "parameters and buffers, rank 1"),
    ],
)
def test_what_differs_between_the_ranks_is_named_before_anything_goes_wrong(
    kind: str, what: str, told: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(told)):
        run_distributed(refused, kind, what)


class Normed(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.line(self.norm(x))
        return made

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


def normed(kind: str, directory: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 3, generator=generator) * (1 + number),) for number in range(6)]
    torch.manual_seed(1)
    task = Normed()
    options: dict[str, Any] = {"run_dir": directory, "checkpoint": True}
    trainer = quiet(max_epochs=2, strategy=strategy(kind), devices=2, **options)
    result = trainer.fit(task, data, data)
    saved = trainer.validate(Normed(), data, checkpoint="last")
    return result.metrics["validation/loss"], saved["validation/loss"], task.norm.running_mean.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_is_validated_is_what_is_saved_also_with_running_means(kind: str, tmp_path: Any) -> None:
    ranks = run_distributed(normed, kind, str(tmp_path))
    for fitted, saved, _ in ranks:
        assert fitted == pytest.approx(saved, rel=1e-6)
    assert ranks[0][2] == ranks[1][2]


class FreezesLate(Callback):
    def on_epoch_start(self, run: Any) -> None:
        if run.progress.epoch == 1:
            run.task.line.bias.requires_grad_(False)


def frozen_late() -> None:
    trainer = quiet(max_epochs=2, strategy=strategy("ddp"), devices=2, callbacks=[FreezesLate()])
    trainer.fit(Regression(), pairs(8))


def test_parameters_that_are_frozen_during_a_run_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"parameters were frozen after the run had begun: line\.bias\."):
        run_distributed(frozen_late)


def test_a_task_without_values_is_refused_where_nothing_gives_them() -> None:
    task = Regression().to("meta")
    with pytest.raises(StrategyError, match=r"made on the meta device .*Strategy 'fsdp' gives them"):
        quiet(max_epochs=1).fit(task, pairs(8))


class Worded(Regression):
    def loss_weight(self, batch: Any) -> Any:
        return "many"


def test_a_weight_that_is_no_number_is_shown() -> None:
    with pytest.raises(ConfigError, match="loss_weight gave 'many'; it gives one number"):
        quiet(max_epochs=1).fit(Worded(), pairs(8))


def test_options_of_the_wrong_kind_are_refused() -> None:
    for wrong in (float("inf"), True, -1):
        for kind in (DDPConfig, FSDPConfig):
            with pytest.raises(ConfigError, match="timeout"):
                kind(timeout=wrong)
    with pytest.raises(ConfigError, match=r"FSDPConfig\(cpu_offload=...\) must be True or False, not 'no'"):
        FSDPConfig(cpu_offload="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard_size"):
        FSDPConfig(sharding="hybrid", shard_size=1.0)  # type: ignore[arg-type]
