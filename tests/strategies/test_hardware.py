"""What a machine is found to have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drivetrain.strategies import Hardware
from drivetrain.strategies.hardware import tpu_chips


def test_the_hardware_of_this_machine_is_what_torch_sees() -> None:
    here = Hardware.here()
    assert here.cuda == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert here.mps is torch.backends.mps.is_available()
    assert here.tpu >= 0


@pytest.mark.parametrize(
    ("hardware", "best", "text"),
    [
        (Hardware(), "cpu", "no CUDA GPUs and no Metal"),
        (Hardware(mps=True), "mps", "no CUDA GPUs and Metal"),
        (Hardware(cuda=1, mps=True), "cuda", "1 CUDA GPU and Metal"),
        (Hardware(cuda=8), "cuda", "8 CUDA GPUs and no Metal"),
        (Hardware(tpu=1), "xla", "no CUDA GPUs, no Metal and 1 TPU chip"),
        (Hardware(tpu=4), "xla", "no CUDA GPUs, no Metal and 4 TPU chips"),
    ],
)
def test_the_best_device_is_a_gpu_then_metal_then_a_tpu_then_the_cpu(
    hardware: Hardware, best: str, text: str
) -> None:
    assert hardware.best_device == best
    assert str(hardware) == text
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
