"""Which strategy, device and number of processes a run gets, for machines and launchers of all kinds."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import ConfigError, DeepSpeedConfig, Engine, StrategyError, Trainer, XLAFSDPConfig
from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.registry import Registry
from drivetrain.distributed.group import own_device
from drivetrain.distributed.launch.children import PARENT
from drivetrain.distributed.launch.environment import ProcessEnvironment, detect
from drivetrain.strategies import (
    STRATEGIES,
    Choice,
    Hardware,
    SingleDevice,
    choose,
    select_precision,
    select_strategy,
)
from drivetrain.strategies.accelerate.launcher import Request
from drivetrain.strategies.ddp import DDP, DDPConfig
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.registry import configure, strategy_class
from drivetrain.strategies.select import OURS

LAPTOP = Hardware()
MAC = Hardware(mps=True)
ONE_GPU = Hardware(cuda=1)
FOUR_GPUS = Hardware(cuda=4)
EIGHT_GPUS = Hardware(cuda=8)
TPU = Hardware(tpu=4)

FULL = as_precision("32")
NO_LAUNCHER: Mapping[str, str] = {}


def torchrun(size: int, nodes: int = 1, rank: int = 0) -> ProcessEnvironment:
    """What a process finds that torchrun has started, `size` of them on each machine."""
    found = detect(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size * nodes),
            "LOCAL_RANK": str(rank % size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    )
    assert found is not None
    return found


def slurm(size: int, nodes: int) -> ProcessEnvironment:
    """What a process finds that srun has started, `size` of them on each machine."""
    found = detect(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": str(size * nodes),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": "gpu[01-02]",
        }
    )
    assert found is not None
    return found


def single(device: str) -> Choice:
    return Choice("single", device)


def ddp(device: str, local: int, nodes: int = 1) -> Choice:
    return Choice("ddp", device, local, local * nodes)


ALONE: list[tuple[str, Hardware, int | str, int, Choice]] = [
    # A laptop.
    ("auto", LAPTOP, "auto", 1, single("cpu")),
    ("auto", LAPTOP, 1, 1, single("cpu")),
    ("auto", LAPTOP, 2, 1, ddp("cpu", 2)),
    ("single", LAPTOP, "auto", 1, single("cpu")),
    ("single", LAPTOP, 1, 1, single("cpu")),
    ("cpu", LAPTOP, "auto", 1, single("cpu")),
    ("cpu", LAPTOP, 4, 1, ddp("cpu", 4)),
    ("ddp", LAPTOP, "auto", 1, ddp("cpu", 1)),
    ("ddp", LAPTOP, 2, 1, ddp("cpu", 2)),
    ("fsdp", LAPTOP, "auto", 1, Choice("fsdp", "cpu")),
    ("fsdp", LAPTOP, 2, 1, Choice("fsdp", "cpu", 2, 2)),
    # A Mac: one process on MPS, several on the CPU.
    ("auto", MAC, "auto", 1, single("mps")),
    ("auto", MAC, 1, 1, single("mps")),
    ("single", MAC, "auto", 1, single("mps")),
    ("mps", MAC, "auto", 1, single("mps")),
    ("cpu", MAC, "auto", 1, single("cpu")),
    ("cpu", MAC, 2, 1, ddp("cpu", 2)),
    ("ddp", MAC, "auto", 1, ddp("cpu", 1)),
    ("ddp", MAC, 2, 1, ddp("cpu", 2)),
    # One GPU.
    ("auto", ONE_GPU, "auto", 1, single("cuda")),
    ("single", ONE_GPU, "auto", 1, single("cuda")),
    ("cuda", ONE_GPU, "auto", 1, single("cuda")),
    ("cpu", ONE_GPU, "auto", 1, single("cpu")),
    ("ddp", ONE_GPU, "auto", 1, ddp("cuda", 1)),
    ("auto", Hardware(cuda=1, mps=True), "auto", 1, single("cuda")),
    ("mps", Hardware(cuda=1, mps=True), "auto", 1, single("mps")),
    # Several GPUs.
    ("auto", FOUR_GPUS, "auto", 1, ddp("cuda", 4)),
    ("auto", FOUR_GPUS, 1, 1, single("cuda")),
    ("auto", FOUR_GPUS, 2, 1, ddp("cuda", 2)),
    ("ddp", FOUR_GPUS, "auto", 1, ddp("cuda", 4)),
    ("auto", EIGHT_GPUS, "auto", 1, ddp("cuda", 8)),
    ("single", EIGHT_GPUS, "auto", 1, single("cuda")),
    ("cuda", EIGHT_GPUS, "auto", 1, single("cuda")),
    ("cuda", EIGHT_GPUS, 8, 1, ddp("cuda", 8)),
    ("cpu", EIGHT_GPUS, "auto", 1, single("cpu")),
    ("cpu", EIGHT_GPUS, 16, 1, ddp("cpu", 16)),
    ("fsdp", EIGHT_GPUS, "auto", 1, Choice("fsdp", "cuda", 8, 8)),
    ("fsdp", EIGHT_GPUS, 1, 1, Choice("fsdp", "cuda")),
    # DeepSpeed's stages have names of their own.
    ("deepspeed", LAPTOP, 2, 1, Choice("deepspeed", "cpu", 2, 2)),
    ("zero1", LAPTOP, "auto", 1, Choice("zero1", "cpu", config=DeepSpeedConfig(stage=1))),
    ("zero3", FOUR_GPUS, "auto", 1, Choice("zero3", "cuda", 4, 4, DeepSpeedConfig(stage=3))),
    # Several machines, that a launcher has yet to start.
    ("auto", EIGHT_GPUS, "auto", 2, ddp("cuda", 8, 2)),
    ("ddp", LAPTOP, 4, 2, ddp("cpu", 4, 2)),
    ("cuda", EIGHT_GPUS, "auto", 2, ddp("cuda", 1, 2)),
    # XLA, in one process: on a TPU also for "auto", and for all of its chips.
    ("auto", Hardware(tpu=1), "auto", 1, Choice("xla", "xla")),
    ("auto", TPU, "auto", 1, Choice("xla_fsdp_v2", "xla")),
    ("xla", TPU, "auto", 1, Choice("xla", "xla")),
    ("xla", LAPTOP, "auto", 1, Choice("xla", "xla")),
    ("xla_fsdp", LAPTOP, 1, 1, Choice("xla_fsdp", "xla")),
    ("xla_fsdp_v2", EIGHT_GPUS, "auto", 1, Choice("xla_fsdp_v2", "xla")),
    # A TPU's host computes on its CPU only when it is told to; a GPU beside it is used.
    ("cpu", TPU, "auto", 1, single("cpu")),
    ("cpu", TPU, 2, 1, ddp("cpu", 2)),
    ("auto", Hardware(cuda=1, tpu=4), "auto", 1, single("cuda")),
]


@pytest.mark.parametrize(("spec", "hardware", "devices", "nodes", "expected"), ALONE)
def test_the_machine_and_what_was_asked_for_decide(
    spec: str, hardware: Hardware, devices: int | str, nodes: int, expected: Choice
) -> None:
    assert choose(spec, hardware, None, devices, nodes) == expected


LAUNCHED: list[tuple[str, Hardware, ProcessEnvironment, int | str, int, Choice]] = [
    ("auto", LAPTOP, torchrun(2), "auto", 1, ddp("cpu", 2)),
    ("auto", LAPTOP, torchrun(2, rank=1), "auto", 1, ddp("cpu", 2)),
    ("auto", LAPTOP, torchrun(2), 2, 1, ddp("cpu", 2)),
    ("auto", LAPTOP, torchrun(1), "auto", 1, single("cpu")),
    ("single", LAPTOP, torchrun(1), "auto", 1, single("cpu")),
    ("cpu", EIGHT_GPUS, torchrun(2), "auto", 1, ddp("cpu", 2)),
    ("auto", EIGHT_GPUS, torchrun(8), "auto", 1, ddp("cuda", 8)),
    ("auto", EIGHT_GPUS, torchrun(1), "auto", 1, single("cuda")),
    ("auto", EIGHT_GPUS, torchrun(2), "auto", 1, ddp("cuda", 2)),
    ("cuda", EIGHT_GPUS, torchrun(4), "auto", 1, ddp("cuda", 4)),
    ("ddp", EIGHT_GPUS, torchrun(1), "auto", 1, ddp("cuda", 1)),
    ("fsdp", FOUR_GPUS, torchrun(4), "auto", 1, Choice("fsdp", "cuda", 4, 4)),
    ("ddp", MAC, torchrun(2), "auto", 1, ddp("cpu", 2)),
    # Several machines: the launcher's number of them need not be repeated.
    ("auto", FOUR_GPUS, slurm(4, 2), "auto", 1, ddp("cuda", 4, 2)),
    ("auto", FOUR_GPUS, slurm(4, 2), "auto", 2, ddp("cuda", 4, 2)),
    ("auto", FOUR_GPUS, slurm(4, 2), 4, 2, ddp("cuda", 4, 2)),
    ("auto", ONE_GPU, slurm(1, 2), "auto", 1, ddp("cuda", 1, 2)),
    ("fsdp", EIGHT_GPUS, torchrun(8, 2, rank=9), "auto", 1, Choice("fsdp", "cuda", 8, 16)),
    ("ddp", LAPTOP, slurm(3, 2), "auto", 1, ddp("cpu", 3, 2)),
]


@pytest.mark.parametrize(("spec", "hardware", "launcher", "devices", "nodes", "expected"), LAUNCHED)
def test_a_launcher_decides_how_many_processes_there_are(
    spec: str,
    hardware: Hardware,
    launcher: ProcessEnvironment,
    devices: int | str,
    nodes: int,
    expected: Choice,
) -> None:
    assert choose(spec, hardware, launcher, devices, nodes) == expected


@pytest.mark.parametrize(
    ("spec", "launcher", "devices", "nodes", "message"),
    [
        ("auto", torchrun(2), 4, 1, "torchrun has started 2 processes.*devices=4 and num_nodes=1 ask for 4"),
        ("single", torchrun(2), 1, 1, "torchrun has started 2 .*devices=1 and num_nodes=1 ask for 1. Leave"),
        ("auto", torchrun(1), 2, 1, "torchrun has started 1 process, .*ask for 2"),
        ("auto", slurm(4, 2), 4, 1, "slurm has started 8 processes, 4 on this machine.*ask for 4"),
        ("auto", slurm(4, 2), 4, 3, "slurm has started 8 .*devices=4 and num_nodes=3 ask for 12"),
        ("auto", slurm(4, 2), 2, 4, "slurm has started 8 .* 4 on this machine, but devices=2 asks for 2 on"),
        ("auto", slurm(4, 2), 8, 1, "slurm has started 8 .* 4 on this machine, but devices=8 asks for 8 on"),
        ("auto", slurm(4, 2), "auto", 3, "slurm has started 8 .*of 2, but num_nodes=3 asks for 3"),
        (
            "single",
            torchrun(2),
            "auto",
            1,
            "'single' runs 1 process on cuda, but torchrun has started 2. Start one",
        ),
        (
            "auto",
            ProcessEnvironment(OURS, 0, 2, 0, 2),
            1,
            1,
            "already runs as 2 processes, started by its first run, .*ask for 1. Use the same number",
        ),
    ],
)
def test_a_launcher_that_says_otherwise_is_not_overruled(
    spec: str, launcher: ProcessEnvironment, devices: int | str, nodes: int, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        choose(spec, EIGHT_GPUS, launcher, devices, nodes)


@pytest.mark.parametrize(
    ("spec", "hardware", "devices", "message"),
    [
        ("auto", FOUR_GPUS, 8, "8 processes were asked for.* sees 4 GPUs. Use at most devices=4, or str"),
        ("ddp", ONE_GPU, 2, "2 processes were asked for.* sees 1 GPU. Use at most devices=1"),
        ("auto", MAC, 2, "'auto' runs 1 process on mps, but devices=2.*Use devices=1, or strategy='cpu'"),
        ("mps", MAC, 2, "'mps' runs 1 process on mps, but devices=2 on 1 node.s. asks for 2"),
        ("single", TPU, 1, "TPU idle .no CUDA GPUs, no Metal and 4 TPU chips.*'auto' or 'xla', .*'cpu'"),
        ("ddp", TPU, 4, "TPU idle"),
        ("auto", TPU, 2, "'auto' runs 1 process on xla, but devices=2.*Use devices=1, or 'xla_fsdp_v2'"),
        ("xla", LAPTOP, 2, "'xla' runs 1 process on xla, but devices=2.*Use devices=1, or 'xla_fsdp_v2'"),
    ],
)
def test_what_a_machine_cannot_do_is_refused(
    spec: str, hardware: Hardware, devices: int | str, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        choose(spec, hardware, None, devices)


def test_processes_that_see_only_their_own_gpu_are_told_how_to_see_all() -> None:
    with pytest.raises(
        StrategyError, match=r"slurm has started 4 processes .*sees 1 GPU\. .*--gpus-per-node"
    ):
        choose("auto", ONE_GPU, slurm(4, 2))


@pytest.mark.parametrize(
    ("name", "hardware", "has"),
    [
        ("cuda", LAPTOP, "no CUDA GPUs and no Metal"),
        ("cuda", MAC, "no CUDA GPUs and Metal"),
        ("cuda", Hardware(tpu=1), "no CUDA GPUs, no Metal and 1 TPU chip"),
        ("mps", LAPTOP, "no CUDA GPUs and no Metal"),
        ("mps", ONE_GPU, "1 CUDA GPU and no Metal"),
        ("mps", EIGHT_GPUS, "8 CUDA GPUs and no Metal"),
    ],
)
def test_a_device_that_is_not_there_is_refused_and_never_replaced(
    name: str, hardware: Hardware, has: str
) -> None:
    message = f"strategy '{name}' cannot run here: this machine has {has}. Use strategy='auto'"
    with pytest.raises(StrategyError, match=message):
        choose(name, hardware)
    with pytest.raises(StrategyError, match=message):
        select_strategy(name, FULL, hardware=hardware)


def test_a_configuration_chooses_its_strategy() -> None:
    config = DDPConfig(bucket_mb=1.0)
    assert choose(config, FOUR_GPUS) == Choice("ddp", "cuda", 4, 4, config)
    made = select_strategy(config, FULL, devices=2, hardware=LAPTOP, environment=NO_LAUNCHER)
    assert isinstance(made, DDP)
    assert made.config is config
    assert made.world_size == 2


def test_several_processes_are_ddp_and_one_is_not() -> None:
    made = select_strategy("auto", FULL, 3, hardware=LAPTOP, environment=NO_LAUNCHER)
    assert (type(made), made.world_size, made.device.type) == (DDP, 3, "cpu")
    made = select_strategy("auto", FULL, hardware=LAPTOP, environment=NO_LAUNCHER)
    assert (type(made), made.world_size, made.device.type) == (SingleDevice, 1, "cpu")
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    made = select_strategy("auto", FULL, hardware=LAPTOP, environment=variables)
    assert (type(made), made.world_size) == (DDP, 2)


def test_processes_that_this_program_has_started_are_not_called_a_launcher_s() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    ours = {**variables, PARENT: "1"}
    with pytest.raises(StrategyError, match="this program already runs as 2 processes"):
        select_strategy("cpu", FULL, 1, hardware=LAPTOP, environment=ours)
    with pytest.raises(StrategyError, match="torchrun has started 2 processes"):
        select_strategy("cpu", FULL, 1, hardware=LAPTOP, environment=variables)


def test_accelerate_launch_s_request_counts_for_auto_alone() -> None:
    request = Request("ddp", {"bucket_mb": 3.0}, "cpu")
    expected = Choice("ddp", "cpu", 1, 1, DDPConfig(bucket_mb=3.0))
    assert choose("auto", FOUR_GPUS, None, request=request) == expected
    assert choose("single", FOUR_GPUS, None, request=request) == single("cuda")
    assert choose("ddp", FOUR_GPUS, None, request=request) == ddp("cuda", 4)
    assert choose("auto", FOUR_GPUS, None, request=Request(device="cpu")) == single("cpu")


def test_the_precision_that_accelerate_launch_was_told_is_taken_unless_one_is_given() -> None:
    told = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert select_precision("auto", told).name == "bf16-mixed"
    assert select_precision("auto", {"ACCELERATE_MIXED_PRECISION": "no"}).name == "32"
    assert select_precision("auto", {}).name == "32"
    assert select_precision("64", told).name == "64"
    assert select_precision(as_precision("bf16-true"), told).name == "bf16-true"
    with pytest.raises(ConfigError, match="unknown precision 'bf-16'"):
        select_precision("bf-16", told)


def test_a_run_has_the_precision_of_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert as_precision(Trainer(max_epochs=1).precision).name == "bf16-mixed"
    assert as_precision(Trainer(max_epochs=1, precision="32").precision).name == "32"
    assert Engine().precision.name == "bf16-mixed"


def test_what_accelerate_launch_cannot_have_is_refused_unless_a_strategy_was_chosen() -> None:
    variables = {"ACCELERATE_USE_MEGATRON_LM": "true"}
    with pytest.raises(StrategyError, match=r"ACCELERATE_USE_MEGATRON_LM=true.*is not part"):
        select_strategy("auto", FULL, hardware=LAPTOP, environment=variables)
    assert select_strategy("cpu", FULL, hardware=LAPTOP, environment=variables).name == "single"


def test_every_one_process_name_runs_here_or_says_why_not() -> None:
    here = Hardware.here()
    for name in ("auto", "cpu", "cuda", "mps", "single"):
        if name in ("auto", "single") or here.has(name):
            device = here.best_device if name in ("auto", "single") else name
            assert select_strategy(name, FULL, devices=1).device.type == device
        else:
            with pytest.raises(StrategyError, match="cannot run here"):
                select_strategy(name, FULL, devices=1)


def test_a_strategy_of_ones_own_is_taken_as_it_is() -> None:
    mine = SingleDevice("cpu")
    assert select_strategy(mine, as_precision("bf16-mixed"), devices=1) is mine
    assert Engine(strategy=mine).strategy is mine
    four = DDP(world_size=4)
    for devices, nodes in ((4, 1), (2, 2), ("auto", 1), ("auto", 2)):
        assert select_strategy(four, FULL, devices, nodes) is four
    for devices, nodes in ((2, 1), (4, 2), ("auto", 3)):
        with pytest.raises(
            StrategyError, match=f"'ddp' runs 4 processes, but devices={devices!r} on {nodes}"
        ):
            select_strategy(four, FULL, devices, nodes)


def test_a_precision_that_the_device_has_not_is_refused() -> None:
    mine = SingleDevice("cpu")
    mine.device = torch.device("mps")
    with pytest.raises(StrategyError, match="precision '64' cannot run on mps: MPS has no float64"):
        select_strategy(mine, as_precision("64"))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("cpuu", "Did you mean 'cpu'"),
        ("fsd", "Did you mean 'fsdp'"),
        ("deepspeed_stage_3_offload", "Here it is called 'zero3_offload'"),
        ("tpu", "Here it is called 'xla'"),
        ("megatron", "Allowed: 'accelerate', 'auto', 'cpu', 'cuda'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_allowed_ones(wrong: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown strategy '{wrong}'.*{hint}"):
        Engine(strategy=wrong)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (None, "Allowed: 'accelerate'"),
        (3, "Allowed: 'accelerate'"),
        (SingleDevice, r"Write SingleDevice\(...\)"),
        (DeepSpeedConfig, r"Write DeepSpeedConfig\(...\)"),
        ({"stage": 2}, r"DeepSpeedConfig\(config=...\)"),
    ],
)
def test_what_is_no_name_and_no_strategy_is_refused(wrong: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy must be a name, a configuration.*{hint}"):
        Engine(strategy=wrong)


def test_a_name_that_stands_for_an_option_takes_no_other() -> None:
    assert configure("zero3", {"stage": 3, "gather_at_end": False}).stage == 3
    with pytest.raises(
        ConfigError, match=r"'zero3' stands for stage=3, but stage=2 was given\. Use.*stage=2"
    ):
        configure("zero3", {"stage": 2})


@pytest.mark.parametrize(
    ("kind", "argument", "hint"),
    [
        (DDPConfig, "bucket_cap", "Did you mean 'bucket_mb'"),
        (DeepSpeedConfig, "offload_optimiser", "Did you mean 'offload_optimizer'"),
        (XLAFSDPConfig, "wrapp", "Did you mean 'wrap'"),
    ],
)
def test_an_unknown_option_is_told_the_nearest(kind: Any, argument: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no argument '{argument}'. {hint}"):
        kind(**{argument: 1})
    with pytest.raises(ConfigError, match=f"{kind.__name__} takes its arguments by name"):
        kind(1)
    made = kind()
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


# Which GPUs.


@pytest.mark.parametrize(
    ("spec", "devices", "environment", "choice"),
    [
        ("auto", [2], None, Choice("single", "cuda", 1, 1, None, (2,))),
        ("cuda", (3,), None, Choice("single", "cuda", 1, 1, None, (3,))),
        ("auto", [3, 1], None, Choice("ddp", "cuda", 2, 2, None, (3, 1))),
        ("fsdp", [0, 2], "torchrun", Choice("fsdp", "cuda", 2, 4, None, (0, 2))),
    ],
)
def test_a_list_chooses_gpus_by_their_indices(
    spec: str, devices: Any, environment: str | None, choice: Choice
) -> None:
    found = torchrun(2, nodes=2) if environment else None
    assert choose(spec, FOUR_GPUS, found, devices, 2 if environment else 1) == choice


def test_an_intel_gpu_is_chosen_by_its_index_too() -> None:
    assert choose("auto", Hardware(xpu=2), devices=[1]) == Choice("single", "xpu", 1, 1, None, (1,))


@pytest.mark.parametrize(
    ("spec", "hardware", "devices", "told"),
    [
        ("auto", LAPTOP, [0, 2], "this run is on cpu. Give the number of processes: devices=2"),
        ("cpu", FOUR_GPUS, [0], "this run is on cpu"),
        ("mps", MAC, [0], "this run is on mps"),
        ("ddp", FOUR_GPUS, [0, 4], "there is no GPU 4; this process sees 4, from 0 to 3"),
        ("auto", FOUR_GPUS, [1, 1], "different indices of GPUs"),
        ("auto", FOUR_GPUS, [], "different indices of GPUs"),
        ("auto", FOUR_GPUS, [-1], "different indices of GPUs"),
        ("auto", FOUR_GPUS, ["0"], "different indices of GPUs"),
        ("auto", FOUR_GPUS, "0,1", "a list of indices of GPUs"),
        ("single", FOUR_GPUS, [0, 1], "runs 1 process on cuda"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(spec: str, hardware: Hardware, devices: Any, told: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(told)):
        choose(spec, hardware, devices=devices)


def test_each_process_takes_the_gpu_of_its_place_in_the_list() -> None:
    strategy = select_strategy("ddp", FULL, [3, 1], hardware=FOUR_GPUS, environment=NO_LAUNCHER)
    assert (strategy.world_size, strategy.gpus) == (2, (3, 1))
    assert [own_device("cuda", local, strategy.gpus) for local in (0, 1)] == [
        torch.device("cuda:3"),
        torch.device("cuda:1"),
    ]
    assert own_device("cuda", 1, None) == torch.device("cuda:1")


def test_what_cannot_take_another_gpu_than_its_own_says_so() -> None:
    with pytest.raises(StrategyError, match=r"chooses GPUs, and the strategy 'single' is an object"):
        select_strategy(SingleDevice("cpu"), FULL, [0])
    pytest.importorskip("accelerate")
    with pytest.raises(StrategyError, match=r"Accelerate takes the GPU .* CUDA_VISIBLE_DEVICES=2,3 before"):
        select_strategy("accelerate", FULL, [2, 3], hardware=FOUR_GPUS, environment=NO_LAUNCHER)


@pytest.mark.parametrize("devices", [0, -1, 1.0, True, "all", None])
def test_a_wrong_number_of_devices_is_refused(devices: Any) -> None:
    for spec in ("cpu", SingleDevice("cpu")):
        with pytest.raises(StrategyError, match="devices must be a positive number of processes, a list"):
            Engine(spec, devices=devices)


@pytest.mark.parametrize("nodes", [0, 1.5, True, "1"])
def test_a_wrong_number_of_nodes_is_refused(nodes: Any) -> None:
    with pytest.raises(StrategyError, match="num_nodes must be a positive number"):
        Engine("cpu", num_nodes=nodes)


@pytest.mark.parametrize(("devices", "nodes", "asked"), [(2, 1, 2), (1, 2, 2), ("auto", 2, 2), (4, 2, 8)])
def test_more_processes_than_the_strategy_runs_are_refused_and_never_ignored(
    devices: int | str, nodes: int, asked: int
) -> None:
    with pytest.raises(StrategyError, match=f"runs 1 process .*asks for {asked}.*Use devices=1"):
        select_strategy("single", FULL, devices, nodes)


@pytest.mark.parametrize("devices", [1, "auto"])
def test_one_process_is_what_one_device_takes(devices: int | str) -> None:
    assert select_strategy("cpu", FULL, devices).world_size == 1


# Strategies of other packages.

PLUGIN = """
from dataclasses import dataclass

from drivetrain.strategies import Support
from drivetrain.strategies.ddp import DDP


@dataclass(frozen=True)
class RingConfig:
    hops: int = 2


class Ring(DDP):
    name = "ring"
    config_type = RingConfig
    needs = "processes in a ring"

    def __init__(self, config=None, *, device="cpu", world_size=1):
        super().__init__(device=device, world_size=world_size)
        self.hops = (config or RingConfig()).hops

    @classmethod
    def available(cls, hardware):
        return Support(hardware.cuda < 2, "rings of GPUs burn")


class Half:
    name = "half"
"""

Install = Callable[[str], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package `ring_plugin` that registers the strategies it is given, as pip would leave it."""

    def install(entries: str) -> None:
        (tmp_path / "ring_plugin.py").write_text(PLUGIN, encoding="utf-8")
        metadata = tmp_path / "ring_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ring-plugin\nVersion: 1.0\n")
        points = "[drivetrain.strategy]\n" + textwrap.dedent(entries)
        (metadata / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(tmp_path)
        # What a fresh process would have: rows that nothing was added to, and a module not yet imported.
        fresh: Registry[Any] = Registry("strategy", dict(STRATEGIES._rows))
        monkeypatch.setattr(STRATEGIES, "_rows", fresh._rows)
        monkeypatch.setattr(STRATEGIES, "_discovered", False)

    monkeypatch.delitem(sys.modules, "ring_plugin", raising=False)
    return install


def test_an_installed_package_adds_a_strategy(installed: Install) -> None:
    installed("ring = ring_plugin:Ring\n")
    made: Any = select_strategy("ring", FULL, 3, hardware=LAPTOP, environment=NO_LAUNCHER)
    assert (made.name, made.world_size, made.hops) == ("ring", 3, 2)
    from ring_plugin import RingConfig  # type: ignore[import-not-found]

    made = select_strategy(RingConfig(hops=5), FULL, hardware=LAPTOP, environment=NO_LAUNCHER)
    assert (made.name, made.world_size, made.hops) == ("ring", 1, 5)
    assert choose("ring", Hardware(tpu=4)).name == "ring"  # it may well use one
    with pytest.raises(StrategyError, match=r"strategy 'ring' cannot run here: rings of GPUs burn"):
        select_strategy("ring", FULL, hardware=EIGHT_GPUS, environment=NO_LAUNCHER)


def test_a_broken_row_of_another_package_says_so_and_hinders_no_other(installed: Install) -> None:
    installed("broken = ring_plugin:Rung\nhalf = ring_plugin:Half\nzring = ring_plugin:Ring\n")
    with pytest.raises(ConfigError, match=r"'broken' is registered as 'ring_plugin:Rung', which cannot be"):
        select_strategy("broken", FULL, hardware=LAPTOP, environment=NO_LAUNCHER)
    with pytest.raises(ConfigError, match=r"'half' .* has no config_type, needs, available; a strategy"):
        select_strategy("half", FULL, hardware=LAPTOP, environment=NO_LAUNCHER)
    assert select_strategy(DDPConfig(), FULL, hardware=LAPTOP, environment=NO_LAUNCHER).name == "ddp"
    from ring_plugin import RingConfig

    assert choose(RingConfig(), LAPTOP).name == "zring"


def test_a_configuration_of_no_strategy_is_refused_with_what_could_not_be_loaded(installed: Install) -> None:
    installed("broken = ring_plugin:Rung\n")
    with pytest.raises(ConfigError, match=r"no strategy takes a Hardware .*Could not be loaded: .*'broken'"):
        choose(Hardware(), LAPTOP)


def test_a_row_whose_package_is_missing_names_the_extra(installed: Install) -> None:
    installed("needy = ring_plugin:Ring\n")
    path = Path(sys.path[0]) / "ring_plugin.py"
    text = "from drivetrain.core.errors import MissingDependencyError\n"
    path.write_text(text + "raise MissingDependencyError('rings', 'ring', 'a ring')\n", encoding="utf-8")
    with pytest.raises(MissingDependencyError, match=r"drivetrain.ring."):
        strategy_class("needy")
    with pytest.raises(ConfigError, match=r"'needy': a ring needs the package 'rings'"):
        choose(Hardware(), LAPTOP)
