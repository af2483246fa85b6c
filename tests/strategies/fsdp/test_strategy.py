"""A model in shards: the same numbers whatever is sharded, wrapped, offloaded or computed again."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import nn

from drivetrain import ConfigError, FSDPConfig, StrategyError, TaskModule
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.wrapping import units
from drivetrain.task.blocks import repeated_blocks
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.check import check_strategy
from drivetrain.testing.strategies.tasks import Tokens

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def fsdp(world_size: int) -> FSDP:
    return FSDP(world_size=world_size)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 4))])
def test_fsdp_conforms(world_size: int) -> None:
    check_strategy(fsdp, world_size)


OPTIONS: dict[str, dict[str, Any]] = {
    "shard_grad_op": {"sharding": "shard_grad_op"},
    "no_shard": {"sharding": "no_shard"},
    "root": {"wrap": ()},
    "by_class": {"wrap": ("Sequential",)},
    "by_size": {"wrap": 100},
    "by_function": {"wrap": lambda module: isinstance(module, nn.Embedding)},
    "offload": {"cpu_offload": True},
    "again": {"activation_checkpointing": "full"},
    "again_by_class": {"activation_checkpointing": ("Sequential",)},
    "again_in_part": {"activation_checkpointing": "selective"},
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_fsdp_change_no_number(name: str) -> None:
    config = FSDPConfig(**OPTIONS[name])
    check_strategy(lambda world_size: FSDP(config, world_size=world_size), checks=["same_as_the_big_batch"])


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_fsdp_conform(name: str) -> None:
    config = FSDPConfig(**OPTIONS[name])
    checks = ["frozen_and_tied", "parameters_may_be_unfrozen", "resume_is_bitwise"]
    check_strategy(lambda world_size: FSDP(config, world_size=world_size), checks=checks)


@pytest.mark.full
def test_shards_may_be_replicated() -> None:
    config = FSDPConfig(sharding="hybrid", shard_size=2)
    checks = ["same_as_the_big_batch", "resume_is_bitwise"]
    check_strategy(lambda world_size: FSDP(config, world_size=world_size), 4, checks=checks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("64", 1e-6), ("bf16-mixed", 0.05), ("bf16-true", 0.1), ("16-mixed", 0.05)]
)
def test_fsdp_conforms_in_every_precision(precision: str, tolerance: float) -> None:
    checks = [
        "same_as_the_big_batch",
        "parameters_may_be_unfrozen",
        "all_ranks_see_the_same",
        "resume_is_bitwise",
    ]
    check_strategy(fsdp, checks=checks, precision=precision, tolerance=tolerance)


class Large(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        loss: torch.Tensor = batch.square().mean()
        return loss


def held(config: FSDPConfig) -> list[int]:
    """Bytes of weights and of optimizer state that a process keeps."""
    from drivetrain import Callback

    sizes: list[int] = []

    class Look(Callback):
        def on_step_end(self, run: Any) -> None:
            (updater,) = run.engine.updaters.values()
            states = [each for state in updater.optimizer.state.values() for each in state.values()]
            for tensors in (list(run.task.parameters()), states):
                local: list[Any] = [getattr(each, "_local_tensor", each) for each in tensors]
                sizes.append(sum(each.numel() * each.element_size() for each in local if each.ndim))

    world_size = int(os.environ["WORLD_SIZE"])
    quiet(
        max_steps=1, strategy=FSDP(config, world_size=world_size), devices=world_size, callbacks=[Look()]
    ).fit(Large(), [torch.ones(4, 64)] * world_size)
    return sizes


@pytest.mark.parametrize(("sharding", "part"), [("full_shard", 4), ("shard_grad_op", 4), ("no_shard", 1)])
def test_a_process_keeps_its_part_of_weights_and_optimizer(sharding: str, part: int) -> None:
    whole = 4 * sum(each.numel() for each in Large().parameters())
    for weights, states in run_distributed(held, FSDPConfig(sharding=sharding), world_size=4):
        assert weights == whole // part
        assert states == 2 * whole // part


def start(_: int) -> Any:
    torch.manual_seed(int(os.environ["RANK"]))
    task = Regression()
    nn.init.normal_(task.line.weight)
    quiet(max_steps=1, strategy=FSDP(world_size=2), devices=2).fit(task, pairs())
    return task.line.weight.tolist()


def test_all_ranks_begin_with_the_weights_of_rank_0() -> None:
    first, second = run_distributed(start, 0)
    assert first == second


def test_repeated_blocks_are_found_and_those_with_tied_parameters_are_not() -> None:
    task = Tokens()
    assert repeated_blocks(task) == list(task.blocks)
    assert units(task, ("Embedding",)) == [task.embedding]
    tied = Tokens(tied=True)
    assert units(tied, ("Embedding",)) == []
    task.blocks[1][0].weight = task.blocks[0][0].weight
    assert repeated_blocks(task) == [task.blocks[2]]


def test_a_task_may_name_the_classes_to_shard_one_at_a_time() -> None:
    class Named(Tokens):
        def block_classes(self) -> tuple[str, ...]:
            return ("Linear", "Embedding")

    task = Named()
    assert units(task, "auto") == [
        each for each in task.modules() if isinstance(each, (nn.Linear, nn.Embedding))
    ]
    assert not any(isinstance(each, nn.Embedding) for each in units(Named(tied=True), "auto"))


def test_containers_are_passed_over_or_refused_as_they_are_never_called() -> None:
    model = nn.ModuleList(
        nn.ModuleDict({"pair": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))})
        for _ in range(2)
    )
    assert repeated_blocks(model) == [each for one in model for each in one["pair"]]  # type: ignore[index]
    with pytest.raises(ConfigError, match="a ModuleDict is never called"):
        units(model, ("ModuleDict",))


def test_parts_chosen_by_function_are_those_for_which_it_is_true() -> None:
    task = Tokens()
    assert units(task, lambda module: isinstance(module, nn.Linear))[-1] is task.blocks[0][0]
    assert units(task, ()) == []


def test_parts_chosen_by_size_are_modules_that_are_called() -> None:
    model = nn.ModuleDict({"lists": nn.ModuleList(nn.MultiheadAttention(4, 2) for _ in range(3))})
    model["line"] = nn.Linear(4, 8)
    assert units(model, 20) == [model["line"]]


class Normed(TaskModule):
    """Computes a batch norm's mean over what a matrix product gives."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(features)
        return made

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def normed(precision: str) -> None:
    """A batch norm in shards ends as alone, where both processes see the batches of the one."""
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    same = [batch for batch in pairs(12, 4) for _ in range(2)]
    for strategy, data in ((SingleDevice("cpu"), same[::2]), (FSDP(world_size=2), same)):
        task = Normed()
        devices = strategy.world_size
        quiet(max_epochs=1, strategy=strategy, devices=devices, precision=precision).fit(task, data)
        norm: Any = task.layers[1]
        states.append((norm.weight.detach(), norm.running_mean))
    tolerance = 1e-6 if precision == "32" else 1e-2
    torch.testing.assert_close(states[1], states[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
def test_batch_norms_work_in_every_precision(precision: str) -> None:
    run_distributed(normed, precision)


def test_a_class_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no module of the class 'Linar'\. Did you mean 'Linear'"):
        units(Tokens(), ("Linar",))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sharding": "full"}, "unknown sharding 'full'.*full_shard"),
        ({"wrap": "blocks"}, "not 'blocks'"),
        ({"wrap": 0}, "not 0"),
        ({"activation_checkpointing": 1.5}, r"\('Block',\), or a policy, not 1.5"),
        ({"shard_size": 2}, "for sharding='hybrid'"),
        ({"activation_checkpointing": dict}, "'selective'.*not <class 'dict'>"),
        ({"forward_prefetch": -1}, "not -1"),
        ({"backward_prefetch": 1.5}, "backward_prefetch must be a number of blocks, not 1.5"),
        ({"tensor_parallel": 0}, "tensor_parallel must be a number of processes, not 0"),
        ({"ignored": "head"}, "such as .*not 'head'"),
        ({"timeout": 0}, "positive"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FSDPConfig(**options)


def test_a_shard_size_must_divide_the_processes() -> None:
    with pytest.raises(StrategyError, match="shard_size=2 does not divide 3 processes"):
        FSDP(FSDPConfig(sharding="hybrid", shard_size=2), world_size=3)


def test_every_precision_is_supported_on_a_cpu() -> None:
    for name in ("32", "64", "bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        assert FSDP().supports(as_precision(name))


def test_synchronised_batch_norm_is_refused_on_a_cpu() -> None:
    with pytest.raises(StrategyError, match="sync_batchnorm needs GPUs"):
        FSDP(FSDPConfig(sync_batchnorm=True))
