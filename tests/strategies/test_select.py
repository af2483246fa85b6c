"""Which strategy, device and number of processes a run gets, for machines and launchers of all kinds."""

from typing import Any

import pytest
import torch

from drivetrain import AccelerateConfig, DeepSpeedConfig, Engine, StrategyError, Trainer
from drivetrain.distributed.launch.environment import ProcessEnvironment, detect
from drivetrain.strategies import Choice, Hardware, SingleDevice, choose, select_precision, select_strategy
from drivetrain.strategies.accelerate.launcher import Request
from drivetrain.strategies.ddp import DDP, DDPConfig
from drivetrain.strategies.precision.registry import as_precision

LAPTOP, MAC, TPU = Hardware(), Hardware(mps=True), Hardware(tpu=4)
ONE_GPU, FOUR_GPUS, EIGHT_GPUS = Hardware(cuda=1), Hardware(cuda=4), Hardware(cuda=8)
GPU_BESIDE_TPU = Hardware(cuda=1, tpu=4)
FULL = as_precision("32")


def torchrun(size: int, nodes: int = 1, rank: int = 0) -> ProcessEnvironment:
    local = {"LOCAL_RANK": str(rank % size), "LOCAL_WORLD_SIZE": str(size)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = detect({"RANK": str(rank), "WORLD_SIZE": str(size * nodes), **local, **address})
    assert found is not None
    return found


def slurm(size: int, nodes: int) -> ProcessEnvironment:
    job = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    step = {"SLURM_STEP_NUM_TASKS": str(size * nodes), "SLURM_STEP_NUM_NODES": str(nodes)}
    found = detect({**job, **step, "SLURM_STEP_NODELIST": "gpu[01-02]"})
    assert found is not None
    return found


def single(device: str) -> Choice:
    return Choice("single", device)


def ddp(device: str, local: int, nodes: int = 1) -> Choice:
    return Choice("ddp", device, local, local * nodes)


# Strategy, machine, devices, nodes, launcher: choice.
CHOICES: list[tuple[Any, ...]] = [
    ("auto", LAPTOP, "auto", 1, None, single("cpu")),
    ("auto", LAPTOP, 2, 1, None, ddp("cpu", 2)),
    ("ddp", LAPTOP, "auto", 1, None, ddp("cpu", 1)),
    ("auto", MAC, "auto", 1, None, single("mps")),
    ("ddp", MAC, 2, 1, None, ddp("cpu", 2)),
    ("auto", ONE_GPU, "auto", 1, None, single("cuda")),
    ("auto", FOUR_GPUS, "auto", 1, None, ddp("cuda", 4)),
    ("single", EIGHT_GPUS, "auto", 1, None, single("cuda")),
    ("cuda", EIGHT_GPUS, 8, 1, None, ddp("cuda", 8)),
    ("accelerate", FOUR_GPUS, "auto", 1, None, Choice("accelerate", "cuda", 4, 4)),
    ("fsdp", EIGHT_GPUS, "auto", 1, None, Choice("fsdp", "cuda", 8, 8)),
    ("zero3", FOUR_GPUS, "auto", 1, None, Choice("zero3", "cuda", 4, 4, DeepSpeedConfig(stage=3))),
    # Several machines, that a launcher has yet to start.
    ("auto", EIGHT_GPUS, "auto", 2, None, ddp("cuda", 8, 2)),
    ("cuda", EIGHT_GPUS, "auto", 2, None, ddp("cuda", 1, 2)),
    # XLA, in one process: on a TPU also for "auto", and for all of its chips.
    ("auto", Hardware(tpu=1), "auto", 1, None, Choice("xla", "xla")),
    ("auto", TPU, "auto", 1, None, Choice("xla_fsdp", "xla")),
    ("xla_fsdp_v2", EIGHT_GPUS, "auto", 1, None, Choice("xla_fsdp_v2", "xla")),
    # A TPU's host computes on its CPU only when it is told to; a GPU beside it is used.
    ("cpu", TPU, 2, 1, None, ddp("cpu", 2)),
    ("auto", GPU_BESIDE_TPU, "auto", 1, None, single("cuda")),
    # A launcher decides how many processes there are, and its number of machines need not be repeated.
    ("auto", LAPTOP, "auto", 1, torchrun(2, rank=1), ddp("cpu", 2)),
    ("single", LAPTOP, "auto", 1, torchrun(1), single("cpu")),
    ("auto", EIGHT_GPUS, "auto", 1, torchrun(2), ddp("cuda", 2)),
    ("auto", FOUR_GPUS, 4, 2, slurm(4, 2), ddp("cuda", 4, 2)),
    ("fsdp", EIGHT_GPUS, "auto", 1, torchrun(8, 2, rank=9), Choice("fsdp", "cuda", 8, 16)),
]


def test_strategy_devices_and_launcher_decide() -> None:
    wrong = []
    for spec, machine, devices, nodes, launcher, expected in CHOICES:
        found = choose(spec, machine, launcher, devices, nodes)
        if found != expected:
            wrong.append(f"{spec}, {machine}, {devices=}, {nodes=}, {launcher}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


def selected(spec: Any, devices: Any = "auto", hardware: Hardware = LAPTOP, **variables: str) -> Any:
    return select_strategy(spec, FULL, devices, hardware=hardware, environment=variables)


def test_configuration_chooses_its_strategy() -> None:
    config = DDPConfig(bucket_mb=1.0)
    assert choose(config, FOUR_GPUS) == Choice("ddp", "cuda", 4, 4, config)
    made = selected(config, 2)
    assert (type(made), made.config, made.world_size) == (DDP, config, 2)
    made = selected(AccelerateConfig(options={"cpu": True}), 2, FOUR_GPUS)
    assert (made.name, made.device.type, made.world_size) == ("accelerate", "cpu", 2)


def test_accelerate_launch_request_counts_for_auto_alone() -> None:
    request = Request("ddp", {"bucket_mb": 3.0}, "cpu")
    expected = Choice("ddp", "cpu", 1, 1, DDPConfig(bucket_mb=3.0))
    assert choose("auto", FOUR_GPUS, None, request=request) == expected
    assert choose("single", FOUR_GPUS, None, request=request) == single("cuda")
    assert choose("ddp", FOUR_GPUS, None, request=request) == ddp("cuda", 4)
    assert choose("auto", FOUR_GPUS, None, request=Request(device="cpu")) == single("cpu")
    variables = {"ACCELERATE_USE_MEGATRON_LM": "true"}
    with pytest.raises(StrategyError, match=r"ACCELERATE_USE_MEGATRON_LM=true.*tensor_parallel"):
        selected("auto", **variables)
    assert selected("cpu", **variables).name == "single"


def test_precision_of_accelerate_launch_is_taken_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert select_precision("auto", told).name == "bf16-mixed"
    assert select_precision("auto", {"ACCELERATE_MIXED_PRECISION": "no"}).name == "32"
    assert select_precision("auto", {}).name == "32"
    assert select_precision("64", told).name == "64"
    assert select_precision(as_precision("bf16-true"), told).name == "bf16-true"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert as_precision(Trainer(max_epochs=1).precision).name == Engine().precision.name == "bf16-mixed"


def test_strategy_object_is_taken_as_it_is_or_refused_for_other_numbers() -> None:
    mine = SingleDevice("cpu")
    assert select_strategy(mine, as_precision("bf16-mixed"), devices=1) is mine
    assert Engine(strategy=mine).strategy is mine
    four = DDP(world_size=4)
    for devices, nodes in ((4, 1), (2, 2), ("auto", 1), ("auto", 2)):
        assert select_strategy(four, FULL, devices, nodes) is four
    for devices, nodes in ((2, 1), (4, 2), ("auto", 3)):
        with pytest.raises(StrategyError, match=f"runs 4 processes, but devices={devices!r} on {nodes}"):
            select_strategy(four, FULL, devices, nodes)
    mine.device = torch.device("mps")
    with pytest.raises(StrategyError, match="precision '64' cannot run on mps: MPS has no float64"):
        select_strategy(mine, as_precision("64"))
