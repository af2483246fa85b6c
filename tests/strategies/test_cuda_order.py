"""What is asked of CUDA, and in which order, by a stand-in that records it."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused

from drivetrain import Engine, StrategyError, Trainer
from drivetrain.distributed import group
from drivetrain.strategies import SingleDevice

STARTING = {"init", "set_device", "current_device", "get_device_capability", "is_bf16_supported", "Stream"}
"""What starts CUDA in this process, after which its forks can use no GPU."""


class Cuda:
    """Two GPUs: `calls` lists what was asked of them, `started_by` what of that starts CUDA."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.started_by: list[str] = []
        self.current = 0
        self.capability = (9, 0)
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "is_initialized": lambda: any(not each.startswith("is_a") for each in self.started_by),
            "init": lambda: None,
            "current_device": lambda: self.current,
            "set_device": self._set,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "a GPU",
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or self.capability >= (8, 0)
            ),
            "Stream": lambda device=None: SimpleNamespace(device=device),
            "default_generators": [torch.Generator() for _ in range(2)],
        }
        for name, answer in answers.items():
            recorded = self._recording(name, answer) if callable(answer) else answer
            patch.setattr(torch.cuda, name, recorded)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)

    def _set(self, device: int | torch.device) -> None:
        self.current = device if isinstance(device, int) else device.index

    def _recording(self, name: str, answer: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            call = f"{name}({', '.join(map(str, arguments))})"
            self.calls.append(call)
            # Without the variable torch asks CUDA itself, and a fork that does so again gets an error.
            asks = name == "is_available" and os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1"
            if asks or name in STARTING:
                self.started_by.append(call)
            return answer(*arguments, **keywords)

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_nothing_starts_cuda_before_the_ranks_are_forked(strategy: str, cuda: Cuda) -> None:
    for precision in ("32", "tf32", "bf16-mixed", "16-mixed"):
        made = Trainer(max_epochs=1, strategy=strategy, devices=2, precision=precision)
        assert made.select_strategy().device.type == "cuda"
    assert cuda.calls
    assert not cuda.started_by


def test_the_gpu_of_a_single_process_is_the_current_one_while_its_engine_lives(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(SingleDevice("cuda:1"))
    assert str(engine.device) == "cuda:1"
    first = next(number for number, each in enumerate(cuda.calls) if each.startswith("Stream"))
    assert "set_device(cuda:1)" in cuda.calls[:first]
    assert cuda.current == 1
    engine.teardown()
    assert cuda.current == 0
    cuda.calls.clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(SingleDevice("cuda:1"))
    assert [each for each in cuda.calls if "set" in each] == ["set_device(cuda:1)", "set_device(0)"]


def test_emulated_bfloat16_is_refused(cuda: Cuda) -> None:
    cuda.capability = (7, 5)
    made: Any = lambda: Trainer(max_epochs=1, strategy="cuda", devices=1, precision="bf16-mixed")  # noqa: E731
    assert_refused(
        StrategyError, {"bf16": (lambda: made().select_strategy(), "this GPU has no bfloat16", "'16-mixed'")}
    )


def test_a_group_of_gpus_has_a_limit_of_10_minutes(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives the half hour of gloo to a group that has NCCL too."""
    given: list[dict[str, Any]] = []
    store = tmp_path / "store-1"
    torch.distributed.FileStore(str(store), 2).set("drivetrain/all here", "")
    monkeypatch.setenv("DRIVETRAIN_STORE", str(store))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _, **all: given.append(all))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises((RuntimeError, ValueError)):  # there is no group
        group.join(2, "cuda")
    assert given[0]["timeout"] == timedelta(minutes=10)
    assert cuda.calls[0] == "set_device(cuda:0)", "before NCCL"
