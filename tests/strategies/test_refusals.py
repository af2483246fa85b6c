"""What strategies, precisions and their options refuse, with the words that help."""

from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain import (
    CompileConfig,
    ConfigError,
    DDPConfig,
    DeepSpeedConfig,
    Engine,
    FSDPConfig,
    StrategyError,
    Trainer,
    XLAFSDPConfig,
)
from drivetrain.distributed.launch.environment import ProcessEnvironment
from drivetrain.strategies import STRATEGIES, Choice, Hardware, SingleDevice, choose
from drivetrain.strategies.checks import check_gathering
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.deepspeed.strategy import check_flat
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.registry import XLA
from drivetrain.strategies.wrapping import ignored_names, units
from drivetrain.testing.strategies.tasks import Tokens

LAPTOP, MAC, TPU = Hardware(), Hardware(mps=True), Hardware(tpu=4)
ONE_GPU, FOUR_GPUS, EIGHT_GPUS = Hardware(cuda=1), Hardware(cuda=4), Hardware(cuda=8)
TORCHRUN = ProcessEnvironment("torchrun", 0, 2, 0, 2)
ALONE = ProcessEnvironment("torchrun", 0, 1, 0, 1)
SLURM = ProcessEnvironment("slurm", 0, 8, 0, 4)


def chosen(spec: Any, hardware: Hardware = EIGHT_GPUS, *others: Any) -> Any:
    return lambda: choose(spec, hardware, *others)


def test_choice_refusals() -> None:
    def on_gpus(*arguments: Any) -> Choice:
        return choose("auto", EIGHT_GPUS, *arguments)

    assert_refused(
        StrategyError,
        {
            "launcher, other total": (lambda: on_gpus(TORCHRUN, 4), "started as 2 processes", "devices=4"),
            "nodes": (lambda: on_gpus(SLURM, 4, 3), "8 processes, 4 on this", "num_nodes=3"),
            "auto on nodes": (lambda: on_gpus(SLURM, "auto", 3), "devices='auto' and num_nodes=3"),
            "single": (chosen("single", EIGHT_GPUS, TORCHRUN), "runs 1 process on cuda", "start one"),
            "too few GPUs": (chosen("auto", FOUR_GPUS, None, 8), "one sees 4 GPUs", "at most devices=4"),
            "idle TPU": (chosen("ddp", TPU), "TPU idle", "4 TPU chips", "'xla'", "'cpu'"),
            "several on XLA": (chosen("xla", LAPTOP, None, 2), "process on xla", "use 'xla_fsdp'"),
            "no CUDA": (chosen("cuda", MAC), "has no CUDA GPUs and Metal", "strategy='auto'"),
            "a list of GPUs": (chosen("auto", FOUR_GPUS, None, [0, 2]), "not [0, 2]", "CUDA_VISIBLE_DEVICES"),
            "no nodes": (lambda: Engine("cpu", num_nodes=0), "num_nodes must be a positive number"),
        },
    )


def test_device_refusals() -> None:
    def of(world_size: int, **options: Any) -> Any:
        return lambda: FSDP(FSDPConfig(**options), world_size=world_size)

    def whole() -> None:
        Trainer(strategy=FSDP(world_size=2), compile=CompileConfig(scope="task"))

    hybrid: dict[str, Any] = {"tensor_parallel": 2, "sharding": "hybrid", "shard_size": 4}
    rows = {
        "GPU": (lambda: SingleDevice("gpu"), "must be 'cpu', 'cuda', 'cuda:1', 'mps' or 'xpu'"),
        "of three": (of(3, sharding="hybrid", shard_size=2), "shard_size=2 does not divide 3"),
        "sync batch norm": (lambda: DDP(DDPConfig(sync_batchnorm=True)), "needs GPUs"),
        "parallel": (of(3, tensor_parallel=2), "tensor_parallel=2 does not divide 3"),
        "hybrid split": (of(4, **hybrid), "shard_size=4 does not divide 2 groups of 2"),
        "compiled whole": (whole, "compile scope 'task' with strategy 'fsdp'", "scope='blocks'"),
    }
    for kind, absent in (
        ("cuda:1", not torch.cuda.is_available()),
        ("mps", not torch.backends.mps.is_available()),
    ):
        if absent:
            rows[kind] = (
                lambda kind=kind: SingleDevice(kind),
                f"'{kind}' is not available",
                "'cpu' or 'auto'",
            )
    task = Tokens()
    size = sum(each.nbytes for each in (*task.parameters(), *task.buffers()))
    check_gathering(task, size)
    rows["gathered at the end"] = (lambda: check_gathering(task, size - 1), "gather_at_end=False", "Tokens")
    divided: Any = nn.Linear(8, 1, bias=False)
    divided.weight.ds_numel, divided.weight.data = 8, torch.empty(0)  # as DeepSpeed's zero.Init leaves it
    rows["gathered from zero.Init"] = (lambda: check_gathering(divided, 31), "Linear would be gathered")
    assert_refused(StrategyError, rows)


def test_option_refusals() -> None:
    def of(kind: Any, **options: Any) -> Any:
        return lambda: kind(**options)

    def mine(**options: Any) -> Any:
        return lambda: Precision("mine", **options)

    boxes = nn.ModuleList([nn.ModuleDict()])
    low = torch.bfloat16
    assert_refused(
        ConfigError,
        {
            "mapping": (of(Engine, strategy={"stage": 2}), "DeepSpeedConfig(config=...)"),
            "DeepSpeed's": (of(DeepSpeedConfig, offload_optimiser=1), "Did you mean 'offload_optimizer'"),
            "time-out": (of(DDPConfig, timeout=-1), "timeout", "above 0"),
            "sharding": (of(FSDPConfig, sharding="full"), "unknown sharding 'full'", "full_shard"),
            "wrap": (of(FSDPConfig, wrap="blocks"), "wrap", "not 'blocks'"),
            "again": (of(FSDPConfig, activation_checkpointing=1.5), "or a policy, not 1.5"),
            "shard size": (of(FSDPConfig, shard_size=2), "for sharding='hybrid'"),
            "parallel": (of(FSDPConfig, tensor_parallel=0), "tensor_parallel=...) must be a whole number"),
            "ignored": (of(FSDPConfig, ignored="head"), "tuple of names", "not 'head'"),
            "ignored name": (lambda: ignored_names(Tokens(), ("heda",)), "'heda'", "'head'"),
            "class": (lambda: units(Tokens(), ("Linar",)), "class 'Linar'", "Did you mean 'Linear'"),
            "container": (lambda: units(boxes, ("ModuleDict",)), "ModuleDict is never called"),
            "XLA, wrap": (of(XLAFSDPConfig, wrap="all"), "wrap", "'auto', names of classes", "not 'all'"),
            "XLA, again": (of(XLAFSDPConfig, activation_checkpointing=True), "'full' or names of classes"),
            "XLA, first": (of(XLAFSDPConfig, xla_fsdp_settings={}), "torch_xla's first FSDP", "'replicas'"),
            "wider": (mine(compute_dtype=torch.float64), "torch.float32 cannot compute in torch.float64"),
            "same": (mine(param_dtype=torch.float64, compute_dtype=torch.float32), "same dtype for both"),
            "scale": (mine(compute_dtype=low, loss_scaling=True), "and compute in torch.bfloat16"),
        },
    )


def test_dtypes_that_zero_cannot_concatenate_are_refused_by_name() -> None:
    def of(dtype: torch.dtype, stage: int = 2, precision: str = "32", trained: bool = True) -> Any:
        model = nn.ModuleDict({"line": nn.Linear(2, 2), "other": nn.Linear(2, 2, dtype=dtype)})
        model["other"].requires_grad_(trained)
        return lambda: check_flat(model, stage, as_precision(precision))

    names = "float32 ('line.weight')"
    assert_refused(
        StrategyError,
        {
            "complex": (of(torch.complex64, precision="bf16-mixed"), names, "complex64 ('other.weight')"),
            "float64": (of(torch.float64), names, "float64 ('other.weight')", "use strategy 'ddp'"),
            "stage 3": (of(torch.bfloat16, stage=3), names, "bfloat16 ('other.weight')"),
        },
    )
    of(torch.bfloat16)()
    of(torch.complex64, trained=False)()
    of(torch.float64, precision="bf16-mixed")()  # all are converted first


def test_compile_refusals() -> None:
    def of(given: Any) -> Any:
        return lambda: Trainer(compile=given)

    assert_refused(
        ConfigError,
        {
            "option": (of({"scop": "task"}), "no argument 'scop'", "'scope'"),
            "scope": (of({"scope": "block"}), "unknown scope", "'blocks'"),
            "backend": (of({"backend": "aot_eger"}), "unknown backend", "'aot_eager'"),
            "both": (of({"options": {}, "mode": "default"}), "mode or options, not both"),
        },
    )


def test_xla_refusals_before_torch_xla_is_loaded() -> None:
    rows: dict[str, Any] = {}
    for name in XLA:
        kind: Any = STRATEGIES[name]
        rows[f"{name}, processes"] = (
            lambda kind=kind: kind(world_size=2),
            "runs 1 process, not 2",
            "xla_fsdp",
        )
        rows[f"{name}, compile"] = (lambda name=name: Trainer(strategy=name, compile=True), name)
        if not kind.available(LAPTOP):
            rows[f"{name}, package"] = (
                lambda name=name: Trainer(strategy=name, devices=2),
                "torch_xla",
                "pip",
            )
        with pytest.raises(ConfigError, match=r"unknown run_after of .* 'steps'.*Did you mean 'step'"):
            kind.config_type(run_after="steps")
        assert kind.config_type().run_after == "micro_batch"
    assert_refused(StrategyError, rows)


def test_xla_precisions_are_supported_or_refused_with_the_reason() -> None:
    for name in XLA:
        kind: Any = STRATEGIES[name]
        supports = lambda each, kind=kind: kind().supports(as_precision(each))  # noqa: E731
        assert supports("32")
        assert supports("bf16-mixed")
        assert "bf16-mixed" in supports("16-true").reason
        assert "bf16-true-nearest" in supports("bf16-true").reason
        assert supports("bf16-true-nearest")
