"""What a machine is found to have; and Intel's GPUs, on a machine without one."""

from pathlib import Path

import pytest
import torch
from tests.support.refusals import assert_refused

from drivetrain import StrategyError, Trainer
from drivetrain.strategies import Hardware, SingleDevice
from drivetrain.strategies.hardware import tpu_chips


def test_best_device_is_a_gpu_then_metal_then_a_tpu_then_the_cpu() -> None:
    for hardware, best, text in (
        (Hardware(), "cpu", "no CUDA GPUs and no Metal"),
        (Hardware(mps=True), "mps", "no CUDA GPUs and Metal"),
        (Hardware(cuda=1, mps=True), "cuda", "1 CUDA GPU and Metal"),
        (Hardware(tpu=4), "xla", "no CUDA GPUs, no Metal and 4 TPU chips"),
    ):
        assert (hardware.best_device, str(hardware)) == (best, text)
        assert hardware.has(best)
        assert hardware.has("cpu")


def test_tpu_chips_are_told_from_googles_other_devices(tmp_path: Path) -> None:
    devices = [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063")]
    for number, (vendor, device) in enumerate(devices):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n", encoding="ascii")
        (tmp_path / str(number) / "device").write_text(f"{device}\n", encoding="ascii")
    (tmp_path / "going").mkdir()
    (tmp_path / "going" / "vendor").write_text("0x1ae0\n", encoding="ascii")  # and its number is gone
    assert tpu_chips(str(tmp_path)) == 2
    assert tpu_chips(str(tmp_path / "nowhere")) == 0


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
def test_intel_gpu_trains_in_one_process() -> None:
    for strategy in ("auto", "single", "xpu"):
        found = Trainer(max_epochs=1, strategy=strategy).select_strategy()
        assert (found.name, str(found.device), found.world_size) == ("single", "xpu:0", 1)
    assert str(SingleDevice("xpu:1").device) == "xpu:1"
    assert str(Hardware.here()).endswith("and 2 Intel GPUs")
    assert_refused(
        StrategyError,
        {
            "several": (lambda: Trainer(strategy="xpu", devices=2), "1 process on xpu", "strategy='cpu'"),
            "float64": (lambda: Trainer(strategy="xpu", precision="64"), "XPU has no float64"),
            "index": (lambda: SingleDevice("xpu:5"), "torch sees 2 GPU", "the last is 'xpu:1'"),
        },
    )
