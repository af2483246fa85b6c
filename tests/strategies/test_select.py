"""Which strategy and device a run gets, for machines of all kinds."""

from __future__ import annotations

import pytest
import torch

from drivetrain import ConfigError, Engine, StrategyError
from drivetrain.precision import as_precision
from drivetrain.strategies import STRATEGIES, Hardware, SingleDevice, select_strategy
from drivetrain.strategies.select import choose_device

NOTHING = Hardware()
ONE_GPU = Hardware(cuda=1)
EIGHT_GPUS = Hardware(cuda=8)
MAC = Hardware(mps=True)


@pytest.mark.parametrize(
    ("name", "hardware", "device"),
    [
        ("auto", NOTHING, "cpu"),
        ("auto", MAC, "mps"),
        ("auto", ONE_GPU, "cuda"),
        ("auto", EIGHT_GPUS, "cuda"),
        ("auto", Hardware(cuda=1, mps=True), "cuda"),
        ("single", NOTHING, "cpu"),
        ("single", MAC, "mps"),
        ("single", EIGHT_GPUS, "cuda"),
        ("cpu", NOTHING, "cpu"),
        ("cpu", EIGHT_GPUS, "cpu"),
        ("cpu", MAC, "cpu"),
        ("cuda", ONE_GPU, "cuda"),
        ("mps", MAC, "mps"),
        ("mps", Hardware(cuda=1, mps=True), "mps"),
    ],
)
def test_a_name_and_the_hardware_decide_the_device(name: str, hardware: Hardware, device: str) -> None:
    assert choose_device(name, hardware) == device


@pytest.mark.parametrize(
    ("name", "hardware", "has"),
    [
        ("cuda", NOTHING, "no CUDA GPUs and no Metal"),
        ("cuda", MAC, "no CUDA GPUs and Metal"),
        ("mps", NOTHING, "no CUDA GPUs and no Metal"),
        ("mps", ONE_GPU, "1 CUDA GPU and no Metal"),
        ("mps", EIGHT_GPUS, "8 CUDA GPUs and no Metal"),
    ],
)
def test_a_device_that_is_not_there_is_refused_and_never_replaced(
    name: str, hardware: Hardware, has: str
) -> None:
    message = f"strategy '{name}' cannot run here: this machine has {has}. Use strategy='auto'"
    with pytest.raises(StrategyError, match=message):
        choose_device(name, hardware)
    with pytest.raises(StrategyError, match=message):
        select_strategy(name, as_precision("32"), hardware=hardware)


def test_every_name_runs_or_says_why_not() -> None:
    assert list(STRATEGIES) == ["auto", "cpu", "cuda", "mps", "single"]
    here = Hardware.here()
    for name in STRATEGIES:
        if name in ("auto", "single") or here.has(name):
            assert select_strategy(name, as_precision("32")).device.type == choose_device(name, here)
        else:
            with pytest.raises(StrategyError, match="cannot run here"):
                select_strategy(name, as_precision("32"))


def test_the_hardware_of_this_machine_is_what_torch_sees() -> None:
    here = Hardware.here()
    assert here.cuda == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert here.mps is torch.backends.mps.is_available()


def test_a_strategy_of_ones_own_is_taken_as_it_is() -> None:
    mine = SingleDevice("cpu")
    assert select_strategy(mine, as_precision("bf16-mixed"), devices=1) is mine
    assert Engine(strategy=mine).strategy is mine


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("cpuu", "Did you mean 'cpu'"), ("fsdp", "Allowed: 'auto', 'cpu', 'cuda', 'mps', 'single'")],
)
def test_an_unknown_name_is_refused_with_the_allowed_ones(wrong: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown strategy '{wrong}'.*{hint}"):
        Engine(strategy=wrong)


@pytest.mark.parametrize("wrong", [None, 3, SingleDevice])
def test_what_is_no_name_and_no_strategy_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="a strategy is given by its name"):
        Engine(strategy=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [0, -1, 1.0, True, "all", None])
def test_a_wrong_number_of_devices_is_refused(devices: object) -> None:
    with pytest.raises(StrategyError, match="devices must be a positive number of processes or 'auto'"):
        Engine("cpu", devices=devices)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [0, 1.5, True, "1"])
def test_a_wrong_number_of_nodes_is_refused(nodes: object) -> None:
    with pytest.raises(StrategyError, match="num_nodes must be a positive number"):
        Engine("cpu", num_nodes=nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "nodes", "asked"), [(2, 1, 2), (1, 2, 2), ("auto", 2, 2), (4, 2, 8), (8, 1, 8)]
)
def test_more_processes_than_the_strategy_runs_are_refused_and_never_ignored(
    devices: int | str, nodes: int, asked: int
) -> None:
    with pytest.raises(StrategyError, match=f"runs 1 process, .*asks for {asked}.*Use devices=1"):
        select_strategy("cpu", as_precision("32"), devices, nodes)


@pytest.mark.parametrize("devices", [1, "auto"])
def test_one_process_is_what_one_device_takes(devices: int | str) -> None:
    assert select_strategy("cpu", as_precision("32"), devices).world_size == 1
