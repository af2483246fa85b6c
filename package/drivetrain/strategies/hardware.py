"""The devices of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_PCI = "/sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""The PCI numbers of TPUs v2 and v3, v4, v5p, v5e, v6e and v7; those of https://github.com/jax-ml/jax."""


@dataclass(frozen=True)
class Hardware:
    """The accelerators of a machine.

    Attributes:
        cuda: The number of CUDA GPUs.
        mps: Whether Apple's Metal is available.
        tpu: The number of TPU chips.
        xpu: The number of Intel GPUs.
    """

    cuda: int = 0
    mps: bool = False
    tpu: int = 0
    xpu: int = 0

    @classmethod
    def here(cls) -> Hardware:
        """Return the hardware of this machine."""
        return cls(
            cuda_devices(),
            torch.backends.mps.is_available(),
            tpu_chips(_PCI),
            torch.xpu.device_count() if torch.xpu.is_available() else 0,
        )

    @property
    def best_device(self) -> str:
        """The fastest kind of device that a strategy can use."""
        found = (("cuda", self.cuda), ("mps", self.mps), ("xpu", self.xpu), ("xla", self.tpu))
        return next((kind for kind, count in found if count), "cpu")

    def has(self, device: str) -> bool:
        """Return whether the machine has a kind of device."""
        found = {"cuda": self.cuda, "mps": self.mps, "xpu": self.xpu, "xla": self.tpu}
        return bool(found.get(device, device == "cpu"))

    def __str__(self) -> str:
        gpus = f"{self.cuda or 'no'} CUDA GPU{'' if self.cuda == 1 else 's'}"
        found = [gpus, "Metal" if self.mps else "no Metal"]
        found += [f"{self.xpu} Intel GPU{'' if self.xpu == 1 else 's'}"] if self.xpu else []
        found += [f"{self.tpu} TPU chip{'' if self.tpu == 1 else 's'}"] if self.tpu else []
        return f"{', '.join(found[:-1])} and {found[-1]}"


def cuda_devices() -> int:
    """Return the number of CUDA GPUs, without starting CUDA: no fork of a process that has could use a GPU.

    torch asks NVIDIA's management library instead if this variable is set, as Accelerate and Fabric set it.
    """
    before = os.environ.get(_BY_NVML)
    os.environ[_BY_NVML] = "1"
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if before is None:
            del os.environ[_BY_NVML]
        else:
            os.environ[_BY_NVML] = before


def tpu_chips(directory: str) -> int:
    """Return the number of TPU chips on the PCI bus; 0 on a system that does not list its PCI devices.

    Args:
        directory: The folder with one folder for each device, which has the files "vendor" and "device".
    """
    found = 0
    for vendor in Path(directory).glob("*/vendor"):
        try:
            is_google = vendor.read_text(encoding="ascii").strip() == _GOOGLE
            found += is_google and vendor.with_name("device").read_text(encoding="ascii").strip() in _TPUS
        except OSError:  # the device was unplugged, or this process may not read it, so it cannot use it
            continue
    return found
