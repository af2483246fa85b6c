"""Intel's GPUs: what is chosen and refused there, on a machine without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import StrategyError, Trainer
from drivetrain.strategies import Hardware, SingleDevice


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two Intel GPUs and no other, as far as it is asked."""
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("intel")
@pytest.mark.parametrize("strategy", ["auto", "single", "xpu"])
def test_an_intel_gpu_trains_in_one_process(strategy: str) -> None:
    found = Trainer(max_epochs=1, strategy=strategy).select_strategy()
    assert (found.name, str(found.device), found.world_size) == ("single", "xpu:0", 1)
    assert str(SingleDevice("xpu:1").device) == "xpu:1"
    assert str(Hardware.here()).endswith("and 2 Intel GPUs")


@pytest.mark.usefixtures("intel")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"devices": 2}, "'xpu' runs 1 process on xpu, but devices=2 .*strategy='cpu' for several"),
        ({"precision": "64"}, "precision '64' cannot run on xpu:0: XPU has no float64"),
    ],
)
def test_what_it_cannot_do_is_refused_when_the_trainer_is_made(options: dict[str, Any], why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        Trainer(**{"max_epochs": 1, "strategy": "xpu", **options})


@pytest.mark.usefixtures("intel")
def test_a_gpu_that_does_not_exist_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"'xpu:5' does not exist: torch sees 2 GPU.*the last is 'xpu:1'"):
        SingleDevice("xpu:5")


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an Intel GPU")
def test_without_one_the_error_says_what_there_is() -> None:
    with pytest.raises(StrategyError, match=r"strategy 'xpu' cannot run here: this machine has .*'auto'"):
        Trainer(max_epochs=1, strategy="xpu")
    with pytest.raises(StrategyError, match="'xpu' is not available: torch sees no Intel GPU"):
        SingleDevice("xpu")
