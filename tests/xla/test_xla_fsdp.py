"""torch_xla's FSDP over all devices of a process: options, and what is divided."""

from typing import Any

import pytest
import torch
from tests.strategies.resuming import check_resume
from tests.support.xla import apart, make, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import StrategyError, XLAFSDPConfig
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.strategies import SingleDevice
from drivetrain.testing import check_strategy
from drivetrain.testing.strategies.tasks import Sequences, Tokens

STEPS = ["frozen_and_tied", "generator_steps"]


class Dropping(nn.Module):  # an activation that drops half, and counts how often it was computed
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(x.tanh(), 0.5, self.training)


def dropping() -> Tokens:  # a task that draws at random in its blocks
    task = Tokens()
    for block in task.blocks:
        assert isinstance(block, nn.Sequential)
        block[1] = Dropping()
    return task


def data() -> DataLoader[Any]:
    return DataLoader(Sequences(12, empty=None), batch_size=4)


@pytest.mark.landing
def test_xla_fsdp_conforms_on_two_devices() -> None:
    checks = ["same_as_the_big_batch", *STEPS, "a_process_may_begin_with_padding", "resume_is_bitwise"]
    checks += ["parameters_may_be_unfrozen", "evaluation_counts_each_sample_once"]

    check_strategy(make("xla_fsdp", devices=2), 1, checks=checks)


OPTIONS = [{"replicas": 2, "activation_checkpointing": "full"}, {"wrap": ("Linear",)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_xla_fsdp_options_conform_on_four_devices(options: dict[str, Any]) -> None:
    check_strategy(make("xla_fsdp", XLAFSDPConfig(**options), 4), 1, checks=STEPS)


def test_activation_checkpointing_draws_the_same_at_random() -> None:
    def run() -> None:
        weights, calls = [], []
        for again in (False, "full"):
            task = dropping()
            trainer("xla_fsdp", XLAFSDPConfig(activation_checkpointing=again), 2).fit(task, data())
            weights.append(module_state(task)[0])
            calls.append([block[1].calls for block in task.blocks])  # type: ignore[index]
        assert calls == [[6] * 3, [12] * 3]
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)

    apart(run)


def test_replicas_that_do_not_divide_the_devices_are_refused() -> None:
    def refused() -> None:
        with pytest.raises(StrategyError, match="replicas=3 does not divide 4 devices"):
            make("xla_fsdp", XLAFSDPConfig(replicas=3), 4)(1)

    apart(refused)


def test_xla_checkpoint_is_resumed_on_other_numbers_of_devices_and_by_other_strategies() -> None:
    makers: dict[str, Any] = {f"on {count}": make("xla_fsdp_v2", devices=count) for count in (2, 4)}
    assert check_resume({"single": lambda world_size: SingleDevice("cpu"), **makers}, (1,)) == 9


def spec(tensor: Any) -> str:  # how a tensor is divided, as XLA writes it
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def specs(run: Any) -> dict[str, set[str]]:
    """How each parameter is divided, with its optimizer's state, which is as large."""
    ((_, updater),) = run.engine.updaters.items()
    found = {}
    for name, parameter in run.task.named_parameters():
        slots = [each for each in updater.optimizer.state[parameter].values() if each.ndim]
        found[name] = {spec(parameter), *map(spec, slots)}
    return found


@pytest.mark.landing
def test_parameters_states_and_samples_are_divided_also_after_a_resume(tmp_path: Any) -> None:
    def run() -> None:
        seen: list[Any] = []
        samples: list[str] = []

        def look(run: Any) -> None:
            seen.append(specs(run))
            samples.append(spec(run.engine.transfer(run.window.micro_batches[0].batch)["tokens"]))

        options: dict[str, Any] = {
            "callbacks": [LambdaCallback(on_step_start=look, on_step_end=look)],
            "run_dir": tmp_path,
            "checkpoint": CheckpointConfig(every="2 steps"),
        }
        data = DataLoader(Sequences(12), batch_size=4)
        trainer("xla_fsdp", None, 4, max_steps=2, **options).fit(Tokens(), data)
        trainer("xla_fsdp", None, 4, max_steps=6, **options).fit(Tokens(), data, resume="auto")
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
