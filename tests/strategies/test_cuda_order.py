"""What is asked of CUDA, and in which order, by a stand-in that records it."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.support.cuda import Cuda
from tests.support.refusals import assert_refused

from drivetrain import Engine, StrategyError, Trainer
from drivetrain.distributed import group
from drivetrain.strategies import SingleDevice


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_nothing_starts_cuda_before_the_ranks_are_forked(strategy: str, cuda: Cuda) -> None:
    for precision in ("32", "tf32", "bf16-mixed", "16-mixed"):
        for devices in (2, [1, 0]):
            made = Trainer(max_epochs=1, strategy=strategy, devices=devices, precision=precision)
            assert made.select_strategy().device.type == "cuda"
    assert cuda.calls
    assert not cuda.started_by


def test_the_gpu_of_a_single_process_is_the_current_one_while_its_engine_lives(cuda: Cuda) -> None:
    for strategy, devices in (("auto", [1]), (SingleDevice("cuda:1"), "auto")):
        cuda.calls.clear()
        engine = Engine(strategy, devices=devices)
        assert str(engine.device) == "cuda:1"
        first = next(number for number, each in enumerate(cuda.calls) if each.startswith("Stream"))
        assert "set_device(cuda:1)" in cuda.calls[:first]
        assert cuda.current == 1
        engine.teardown()
        assert cuda.current == 0


def test_emulated_bfloat16_is_refused(cuda: Cuda) -> None:
    cuda.capability = (7, 5)
    made: Any = lambda: Trainer(max_epochs=1, strategy="cuda", devices=1, precision="bf16-mixed")  # noqa: E731
    assert_refused(
        StrategyError, {"bf16": (lambda: made().select_strategy(), "this GPU has no bfloat16", "'16-mixed'")}
    )


def test_a_group_of_gpus_has_a_limit_of_10_minutes(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives the half hour of gloo to a group that has NCCL too."""
    given: list[dict[str, Any]] = []
    rendezvous = iter([(torch.distributed.HashStore(), 0, 2)])
    monkeypatch.setattr(group, "rendezvous", lambda *_, **__: rendezvous)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _, **all: given.append(all))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises((RuntimeError, ValueError)):  # there is no group
        group.join(2, "cuda")
    assert given[0]["timeout"] == timedelta(minutes=10)
    assert cuda.calls[0] == "set_device(cuda:0)", "before NCCL"
