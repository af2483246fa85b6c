"""torch_xla's FSDP, on one device and over all devices of a process: options, names, and what is left."""

from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.xla import apart, make, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import ConfigError, StrategyError, XLAFSDPConfig, XLAFSDPv2Config
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.strategies import SingleDevice
from drivetrain.testing import check_strategy
from drivetrain.testing.strategies.resume import check_resume
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
def test_xla_fsdp_conforms() -> None:
    check_strategy(make("xla_fsdp"), 1, checks=["same_as_the_big_batch", *STEPS])


def test_xla_fsdp_options_conform() -> None:
    check_strategy(make("xla_fsdp"), 1, checks=["frozen_and_tied"], precision="bf16-mixed", tolerance=0.05)
    classes = XLAFSDPConfig(wrap=("Embedding", "Linear"), activation_checkpointing=("Sequential",))
    check_strategy(make("xla_fsdp", classes), 1, checks=STEPS[:1])
    whole = XLAFSDPConfig(wrap=(), xla_fsdp_settings={"reshard_after_forward": False})
    check_strategy(make("xla_fsdp", whole), 1, checks=STEPS)


@pytest.mark.landing
def test_xla_fsdp_v2_conforms_on_two_devices() -> None:
    checks = ["same_as_the_big_batch", *STEPS, "a_process_may_begin_with_padding", "resume_is_bitwise"]
    checks += ["parameters_may_be_unfrozen", "evaluation_counts_each_sample_once"]

    check_strategy(make("xla_fsdp_v2", devices=2), 1, checks=checks)


OPTIONS = [{"replicas": 2, "activation_checkpointing": "full"}, {"wrap": ("Linear",)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_xla_fsdp_v2_options_conform_on_four_devices(options: dict[str, Any]) -> None:
    check_strategy(make("xla_fsdp_v2", XLAFSDPv2Config(**options), 4), 1, checks=STEPS)


BOTH = [("xla_fsdp", XLAFSDPConfig, 1), ("xla_fsdp_v2", XLAFSDPv2Config, 2)]


@pytest.mark.parametrize(("name", "kind", "devices"), BOTH)
def test_activation_checkpointing_draws_the_same_at_random(name: str, kind: Any, devices: int) -> None:
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


def test_xla_fsdp_shards_blocks_under_plain_names_and_passes_settings_on() -> None:
    def run() -> None:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Wrapper

        names, seen = sorted(Tokens().state_dict()), []

        def look(run: Any) -> None:
            whole = run.engine.model.whole
            blocks = [isinstance(each, Wrapper) for each in run.task.blocks]
            seen.append((sorted(module_state(run.task)[0]), blocks, whole.compute_dtype))

        settings = {"compute_dtype": "bfloat16"}
        config, task = XLAFSDPConfig(xla_fsdp_settings=settings), Tokens()
        callbacks = [LambdaCallback(on_step_end=look)]
        trainer("xla_fsdp", config, callbacks=callbacks, max_epochs=1).fit(task, data())
        assert seen == [(names, [True] * 3, torch.bfloat16)] * 3
        assert [type(each) for each in task.blocks] == [nn.Sequential] * 3
        assert sorted(task.state_dict()) == names
        assert all(each.dtype is torch.float32 and each.device.type == "cpu" for each in task.parameters())
        assert not any("forward" in vars(each) for each in task.modules())
        assert task(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 4, 11)

    apart(run)


def test_xla_fsdp_refusals() -> None:
    def alone() -> None:
        task = Tokens()
        task.scale = nn.Parameter(torch.ones(()))
        config = XLAFSDPConfig(xla_fsdp_settings={"reshard": True})
        assert_refused(
            (ConfigError, StrategyError),
            {
                "setting": (lambda: trainer("xla_fsdp", config).fit(Tokens(), data()), "'reshard'"),
                "scalar": (lambda: trainer("xla_fsdp").fit(task, data()), "'scale' is a scalar", "(1,)"),
            },
        )

    def several(name: str, config: Any, devices: int, words: str) -> None:
        with pytest.raises(StrategyError, match=words):
            make(name, config, devices)(1)

    apart(alone)
    apart(several, "xla_fsdp", None, 2, r"are 2 XLA devices.*deadlock.*'xla_fsdp_v2'")
    apart(several, "xla_fsdp_v2", XLAFSDPv2Config(replicas=3), 4, "replicas=3 does not divide 4 devices")


def test_xla_checkpoint_is_resumed_on_other_numbers_of_devices_and_by_other_strategies() -> None:
    makers: dict[str, Any] = {f"v2 on {count}": make("xla_fsdp_v2", devices=count) for count in (2, 4)}
    makers["xla_fsdp"] = make("xla_fsdp")
    assert check_resume({"single": lambda world_size: SingleDevice("cpu"), **makers}, (1,)) == 16


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
