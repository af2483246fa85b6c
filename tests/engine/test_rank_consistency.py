"""What ranks must have alike is compared before they exchange anything; buffers are the same on all."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.failing import run_program
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import (
    Callback,
    ConfigError,
    DDPConfig,
    FSDPConfig,
    LambdaCallback,
    OptimizerConfig,
    StrategyError,
    TaskModule,
)
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.rank_consistency import check_same_call, check_same_optimizers
from drivetrain.engine.updater import build_updaters, optimizer_specs
from drivetrain.run.settings import same_on_all_ranks
from drivetrain.strategies.ddp import DDP, settle_buckets
from drivetrain.strategies.fsdp.strategy import FSDP
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
        ("shape", "different tasks: 'line.weight' is float32[1, 4] on rank 0 and float32[2, 3]"),
        ("frozen", ", frozen on rank 1. Make the same task on all"),
        ("more", "'late.weight' is not there on rank 0 and float32[2, 2] on rank 1"),
    ],
)
def test_what_differs_between_the_ranks_is_named_before_anything_goes_wrong(
    kind: str, what: str, told: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(told)):
        run_distributed(refused, kind, what)


class Weighted(Regression):
    def loss_weight(self, batch: Any) -> Any:
        return 1.0


def on_meta(task: Any) -> Any:
    return task.to("meta")


def one_sees(options: Any = None, make: Any = Regression, arguments: Any = None, verb: str = "fit") -> str:
    """What is said to this rank when rank 1 has what is given, and rank 0 has not."""
    rank = int(os.environ["RANK"])
    one = strategy("ddp") if options is None or not rank else options
    one.setup()
    try:
        given = (make(), verb, arguments or {}) if rank else (Regression(), "fit", {})
        check_same_call(same_on_all_ranks(quiet()), given[0], one, given[1], **given[2])
    except (ConfigError, StrategyError) as error:
        return str(error)
    finally:
        one.teardown()
    return ""


def optimizer_sees(configured: Any, alike: bool = False) -> str:
    """The same of what `configure_optimizers` gives on rank 1; on both if they are to be alike."""
    mine = configured if alike or os.environ["RANK"] == "1" else None
    task = Regression(mine)
    ranks = Ranks.of_job()
    updaters = build_updaters(task, optimizer_specs(task.configure_optimizers()), 10, None)
    try:
        check_same_optimizers(task, updaters, 10, ranks)
    except ConfigError as error:
        return str(error)
    finally:
        ranks.close()
    return ""


def only_the_bias(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters[1:], lr=0.05)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update)


SEEN: list[tuple[Any, str]] = [
    (lambda: one_sees(), ""),
    (
        lambda: one_sees(DDP(DDPConfig(communication=settle_buckets), world_size=2)),
        "DDPConfig.communication is None on rank 0 and <function settle_buckets> on rank 1",
    ),
    (
        lambda: one_sees(verb="test", arguments={"checkpoint": "best"}),
        "the ranks do different things: the verb is fit on rank 0 and test on rank 1",
    ),
    (lambda: one_sees(strategy("fsdp")), "different Trainers: strategy is ddp on rank 0 and fsdp on rank 1"),
    (lambda: one_sees(make=Weighted), "loss_weight is the default on rank 0 and overridden on rank 1"),
    (lambda: one_sees(make=lambda: on_meta(Regression())), ", on the meta device on rank 1"),
    (
        lambda: one_sees(arguments={"resume": "auto"}),
        "different arguments: resume is not there on rank 0 and 'auto' on rank 1",
    ),
    (lambda: optimizer_sees(OptimizerConfig("adamw", schedule="cosine"), alike=True), ""),
    (lambda: optimizer_sees(only_the_bias, alike=True), ""),
    (
        lambda: optimizer_sees(OptimizerConfig("adam", lr=0.05)),
        "the kind of optimizer 'default' is SGD on rank 0 and Adam on rank 1",
    ),
    (
        lambda: optimizer_sees(OptimizerConfig("sgd", lr=0.5)),
        "lr of group 0 of optimizer 'default' is 0.05 on rank 0 and 0.5 on rank 1",
    ),
    (
        lambda: optimizer_sees(OptimizerConfig("sgd", lr=0.05, schedule="cosine")),
        "the schedule's factor at update 0 of optimizer 'default' is not there on rank 0",
    ),
    (
        lambda: optimizer_sees(OptimizerConfig("sgd", lr=0.05, max_grad_norm=1.0)),
        "max_grad_norm of optimizer 'default' is None on rank 0 and 1.0 on rank 1",
    ),
    (
        lambda: optimizer_sees(only_the_bias),
        "the group of 'line.weight' is 0 of optimizer 'default' on rank 0 and not there on rank 1",
    ),
]


def all_seen() -> Any:
    return [see() for see, _ in SEEN]


def test_strategies_tasks_and_optimizers_that_differ_are_named_and_others_are_not() -> None:
    for said in run_distributed(all_seen):
        for found, (_, expected) in zip(said, SEEN, strict=True):
            assert expected in found if expected else not found


def own_rate(what: str) -> None:
    """A fit whose rank 1 has another rate, or begins anew where the other goes on."""
    rank = int(os.environ["RANK"])
    task = Regression(OptimizerConfig("sgd", lr=0.1 * (1 + rank)) if what == "rate" else None)
    resume = "auto" if what == "resume" and rank else None
    quiet(max_epochs=1, strategy=strategy("ddp"), devices=2, run_dir="run").fit(task, pairs(8), resume=resume)


@pytest.mark.parametrize(
    ("what", "told"), [("rate", "a different model: lr of group 0"), ("resume", "resume is None on rank 0")]
)
def test_a_fit_whose_ranks_would_go_apart_is_refused(what: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(told)):
        run_distributed(own_rate, what)


def own_directory(path: str) -> Any:
    """A run whose ranks were given directories of their own; rank 0 takes its time at the end."""
    rank, task = os.environ["RANK"], Regression()
    slow = LambdaCallback(on_fit_end=lambda run: time.sleep(0 if int(rank) else 0.5))
    options: dict[str, Any] = {"run_dir": f"{path}/{rank}", "checkpoint": True, "callbacks": [slow]}
    trainer = quiet(max_epochs=1, strategy=strategy("ddp"), devices=2, **options)
    result = trainer.fit(task, pairs(8), pairs(8))
    is_there = os.path.exists(str(result.model_path))
    trainer.validate(task, pairs(8), checkpoint="best")
    again = quiet(max_epochs=2, strategy=strategy("ddp"), devices=2, run_dir=options["run_dir"])
    return is_there, str(result.run_dir), again.fit(task, pairs(8), resume="auto").progress.updates


def test_the_run_directory_is_that_of_rank_0_and_is_complete_when_fit_returns(tmp_path: Any) -> None:
    found = run_distributed(own_directory, str(tmp_path))
    assert found == [(True, f"{tmp_path}/0", 4)] * 2
    assert not (tmp_path / "1").exists()


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
    with pytest.raises(RuntimeError, match=r"parameters were frozen after the run had started: line\.bias\."):
        run_distributed(frozen_late)


class ThawsLate(Callback):
    def on_fit_start(self, run: Any) -> None:
        run.task.line.weight.requires_grad_(False)

    def on_epoch_start(self, run: Any) -> None:
        run.task.line.weight.requires_grad_(run.progress.epoch > 0)


def thawed_late(kind: Any, world_size: int) -> Any:
    task = Regression()
    trainer = quiet(max_epochs=2, strategy=kind, devices=world_size, callbacks=[ThawsLate()])
    trainer.fit(task, pairs(8, batch_size=4 // world_size))
    return task.line.weight.tolist()


@pytest.mark.parametrize("kind", [DDPConfig(find_unused_parameters=True), "fsdp"], ids=["ddp", "fsdp"])
def test_what_is_frozen_when_the_run_has_begun_can_be_trained_later(kind: Any) -> None:
    alone = thawed_late("cpu", 1)
    for found in run_distributed(thawed_late, kind, 2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=1e-6, atol=1e-6)
    assert alone != Regression().line.weight.tolist()


LATE = """
import os
from tests.support.tasks import Regression, pairs, quiet
from torchmetrics import MeanSquaredError

class Late(Regression):
    asked = 0

    def metrics(self):
        self.asked += 1
        if self.asked == 2 and os.environ["RANK"] == "0":
            raise ValueError("too late")
        return {"error": MeanSquaredError()}

quiet(max_epochs=1, strategy="ddp", devices=2).fit(Late(), pairs(8), pairs(8))
"""


def test_an_error_late_in_the_set_up_of_one_rank_is_the_last_that_is_said(tmp_path: Any) -> None:
    ended = run_program(LATE, tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert ended.code == 1
    assert ended.errors[-1].endswith("rank 0 failed first, in the set-up of the run: ValueError: too late")


def test_a_task_without_values_is_refused_where_nothing_gives_them() -> None:
    task = Regression().to("meta")
    with pytest.raises(
        StrategyError, match=r"made on the meta device and has no values .*Strategies 'fsdp' and 'zero3'"
    ):
        quiet(max_epochs=1).fit(task, pairs(8))


class Worded(Regression):
    def loss_weight(self, batch: Any) -> Any:
        return "many"


def test_a_weight_that_is_no_number_is_shown() -> None:
    with pytest.raises(ConfigError, match="loss_weight gave 'many'; it must return one number"):
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
