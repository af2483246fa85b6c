"""Fully sharded over all devices of a process: the same numbers, and each device has its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.xla import apart, make, trainer
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import StrategyError, XLAFSDPv2Config
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.strategies import SingleDevice
from drivetrain.testing import check_strategy
from drivetrain.testing.strategies.resume import check_resume
from drivetrain.testing.strategies.tasks import Sequences, Tokens


def test_numbers_are_those_of_the_cpu_on_two_devices() -> None:
    checks = [
        "same_as_the_big_batch",
        "a_process_may_begin_with_padding",
        "frozen_and_tied",
        "parameters_may_be_unfrozen",
        "generator_steps",
        "evaluation_counts_each_sample_once",
        "resume_is_bitwise",
    ]
    check_strategy(make("xla_fsdp_v2", devices=2), 1, checks=checks)


@pytest.mark.parametrize(
    "config",
    [
        XLAFSDPv2Config(),
        XLAFSDPv2Config(replicas=2, activation_checkpointing="full"),
        XLAFSDPv2Config(wrap=("Linear",)),
    ],
    ids=["sharded", "replicas", "classes"],
)
def test_so_they_are_on_four(config: XLAFSDPv2Config) -> None:
    check_strategy(make("xla_fsdp_v2", config, 4), 1, checks=["frozen_and_tied", "generator_steps"])


def test_so_they_are_in_bfloat16() -> None:
    make_it = make("xla_fsdp_v2", devices=2)
    check_strategy(make_it, 1, checks=["frozen_and_tied"], precision="bf16-mixed", tolerance=0.05)


def test_a_checkpoint_is_resumed_on_other_numbers_of_devices_and_by_other_strategies() -> None:
    makers: dict[str, Any] = {
        f"xla_fsdp_v2 on {count}": make("xla_fsdp_v2", devices=count) for count in (2, 4)
    }
    makers["xla_fsdp"] = make("xla_fsdp")
    assert check_resume({"single": lambda world_size: SingleDevice("cpu"), **makers}, (1,)) == 16


def spec(tensor: Any) -> str:
    """How a tensor is divided, as XLA writes it."""
    import torch_xla

    found: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return found


def specs(run: Any) -> dict[str, set[str]]:
    """How each parameter is divided, with its optimizer's state, which is as large."""
    ((_, updater),) = run.engine.updaters.items()
    found = {}
    for name, parameter in run.task.named_parameters():
        slots = [each for each in updater.optimizer.state[parameter].values() if each.ndim]
        found[name] = {spec(parameter), *map(spec, slots)}
    return found


def test_parameters_states_and_samples_are_divided_as_torch_xla_does_also_after_a_resume(
    tmp_path: Any,
) -> None:
    def run() -> None:
        seen: list[dict[str, set[str]]] = []
        samples: list[str] = []

        def look(run: Any) -> None:
            seen.append(specs(run))
            samples.append(spec(run.window.micro_batches[0].batch["tokens"]))

        options: dict[str, Any] = {
            "callbacks": [LambdaCallback(on_step_start=look, on_step_end=look)],
            "run_dir": tmp_path,
            "checkpoint": CheckpointConfig(every="2 steps"),
        }
        data = DataLoader(Sequences(12), batch_size=4)
        trainer("xla_fsdp_v2", None, 4, max_steps=2, **options).fit(Tokens(), data)
        trainer("xla_fsdp_v2", None, 4, max_steps=6, **options).fit(Tokens(), data, resume="auto")
        import torch_xla.distributed.spmd as spmd
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

        mesh = spmd.Mesh(list(range(4)), (1, 4), ("data", "fsdp"))
        task = Tokens()
        SpmdFullyShardedDataParallel(task, mesh=mesh)
        expected = {name: {spec(parameter)} for name, parameter in task.named_parameters()}
        assert all("devices=" in each for (each,) in expected.values())
        assert seen == [expected] * 12
        assert samples == [samples[0]] * 12
        assert samples[0].startswith("{devices=[4,1]")

    apart(run)


def test_afterwards_the_task_is_an_ordinary_one_in_the_hosts_memory() -> None:
    def run() -> None:
        task = Tokens(tied=True)
        config = XLAFSDPv2Config(activation_checkpointing="full")
        trainer("xla_fsdp_v2", config, 2).fit(task, DataLoader(Sequences(12), batch_size=4))
        assert {each.device.type for each in task.parameters()} == {"cpu"}
        assert task.head.weight is task.embedding.weight
        hooks = [(*each._forward_pre_hooks, *each._forward_hooks) for each in task.modules()]
        assert not any(hooks)
        assert not any("forward" in vars(each) for each in task.modules())
        assert task(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 4, 11)

    apart(run)


def test_what_is_smaller_than_the_devices_are_many_is_whole_on_each() -> None:
    def run() -> None:
        task = Tokens()
        task.scale = nn.Parameter(torch.ones(()))
        task.few = nn.Parameter(torch.ones(3))
        data = DataLoader(Sequences(9), batch_size=2)  # the last of one sample
        seen: dict[str, set[str]] = {}

        def look(run: Any) -> None:
            seen.update({name: {spec(each)} for name, each in run.task.named_parameters()})

        callbacks = [LambdaCallback(on_step_end=look)]
        trainer("xla_fsdp_v2", None, 4, max_epochs=1, callbacks=callbacks).fit(task, data)
        assert seen["scale"] == seen["few"] == {"{replicated}"}

    apart(run)


def test_replicas_that_do_not_divide_the_devices_are_refused() -> None:
    def run() -> None:
        with pytest.raises(StrategyError, match="replicas=3 does not divide 4 devices"):
            make("xla_fsdp_v2", XLAFSDPv2Config(replicas=3), 4)(1)

    apart(run)
