"""torch_xla's FSDP on one device: its options, plain names, and what is left of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.xla import apart, make, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import ConfigError, StrategyError, XLAFSDPConfig, XLAFSDPv2Config
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.testing import check_strategy
from drivetrain.testing.strategies.tasks import Sequences, Tokens

STEPS = ["frozen_and_tied", "generator_steps"]


class Dropping(nn.Module):
    """An activation that drops half, and counts how often it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(x.tanh(), 0.5, self.training)


def dropping() -> Tokens:
    """A task that draws at random in its blocks."""
    task = Tokens()
    for block in task.blocks:
        assert isinstance(block, nn.Sequential)
        block[1] = Dropping()
    return task


def data() -> DataLoader[Any]:
    return DataLoader(Sequences(12, empty=None), batch_size=4)


def test_numbers_are_those_of_the_cpu() -> None:
    check_strategy(make("xla_fsdp"), 1, checks=["same_as_the_big_batch", *STEPS])


def test_so_they_are_in_bfloat16() -> None:
    check_strategy(make("xla_fsdp"), 1, checks=["frozen_and_tied"], precision="bf16-mixed", tolerance=0.05)


@pytest.mark.parametrize(
    ("config", "checks"),
    [
        (XLAFSDPConfig(wrap=("Embedding", "Linear"), activation_checkpointing=("Sequential",)), STEPS[:1]),
        (XLAFSDPConfig(wrap=(), xla_fsdp_settings={"reshard_after_forward": False}), STEPS),
    ],
    ids=["classes", "whole"],
)
def test_options_change_no_number(config: XLAFSDPConfig, checks: list[str]) -> None:
    check_strategy(make("xla_fsdp", config), 1, checks=checks)


@pytest.mark.parametrize(
    ("name", "kind", "devices"), [("xla_fsdp", XLAFSDPConfig, 1), ("xla_fsdp_v2", XLAFSDPv2Config, 2)]
)
def test_what_is_computed_again_draws_the_same_at_random(name: str, kind: Any, devices: int) -> None:
    def run() -> None:
        weights, calls = [], []
        for again in (False, "full"):
            task = dropping()
            trainer(name, kind(activation_checkpointing=again), devices).fit(task, data())
            weights.append(module_state(task)[0])
            calls.append([block[1].calls for block in task.blocks])  # type: ignore[index]
        assert calls == [[6] * 3, [12] * 3]
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)

    apart(run)


def test_in_a_run_the_blocks_are_sharded_under_plain_names_and_settings_are_passed_on() -> None:
    def run() -> None:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Wrapper

        names, seen = sorted(Tokens().state_dict()), []

        def look(run: Any) -> None:
            whole = run.engine.model.whole
            blocks = [isinstance(each, Wrapper) for each in run.task.blocks]
            seen.append((sorted(module_state(run.task)[0]), blocks, whole.compute_dtype))

        settings = {"compute_dtype": "bfloat16"}
        config = XLAFSDPConfig(xla_fsdp_settings=settings)
        task = Tokens()
        callbacks = [LambdaCallback(on_step_end=look)]
        trainer("xla_fsdp", config, callbacks=callbacks, max_epochs=1).fit(task, data())
        assert seen == [(names, [True] * 3, torch.bfloat16)] * 3
        assert [type(each) for each in task.blocks] == [nn.Sequential] * 3
        assert sorted(task.state_dict()) == names
        assert all(each.dtype is torch.float32 and each.device.type == "cpu" for each in task.parameters())
        assert not any("forward" in vars(each) for each in task.modules())
        assert task(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 4, 11)

    apart(run)


def test_several_devices_are_refused_with_the_reason() -> None:
    def run() -> None:
        with pytest.raises(StrategyError, match=r"are 2 XLA devices.*deadlock.*'xla_fsdp_v2'"):
            make("xla_fsdp", devices=2)(1)

    apart(run)


def test_a_setting_that_torch_xla_does_not_have_and_a_scalar_are_refused() -> None:
    def run() -> None:
        config = XLAFSDPConfig(xla_fsdp_settings={"reshard": True})
        with pytest.raises(ConfigError, match=r"torch_xla refuses.*'reshard'"):
            trainer("xla_fsdp", config).fit(Tokens(), data())
        task = Tokens()
        task.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(StrategyError, match=r"'scale' is a scalar.*the shape \(1,\)"):
            trainer("xla_fsdp").fit(task, data())

    apart(run)
