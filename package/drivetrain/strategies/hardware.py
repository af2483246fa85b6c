"""What a machine can compute on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_PCI = "/sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""The PCI numbers of TPUs v2 and v3, v4, v5p, v5e, v6e and v7; those of https://github.com/jax-ml/jax."""


@dataclass(frozen=True)
class Hardware:
    """What this machine has.

    Attributes:
        cuda: The number of CUDA GPUs.
        mps: Whether Apple's Metal can be used.
        tpu: The number of TPU chips.
    """

    cuda: int = 0
    mps: bool = False
    tpu: int = 0

    @classmethod
    def here(cls) -> Hardware:
        """This machine's."""
        return cls(
            torch.cuda.device_count() if torch.cuda.is_available() else 0,
            torch.backends.mps.is_available(),
            tpu_chips(_PCI),
        )

    @property
    def best_device(self) -> str:
        """The fastest kind of device that a strategy can use."""
        return "cuda" if self.cuda else "mps" if self.mps else "xla" if self.tpu else "cpu"

    def has(self, device: str) -> bool:
        """Whether there is such a kind of device."""
        return {"cuda": self.cuda > 0, "mps": self.mps, "xla": self.tpu > 0}.get(device, device == "cpu")

    def __str__(self) -> str:
        gpus = f"{self.cuda or 'no'} CUDA GPU{'' if self.cuda == 1 else 's'}"
        metal = "Metal" if self.mps else "no Metal"
        if not self.tpu:
            return f"{gpus} and {metal}"
        return f"{gpus}, {metal} and {self.tpu} TPU chip{'' if self.tpu == 1 else 's'}"


def tpu_chips(directory: str) -> int:
    """How many TPU chips there are among the devices of the PCI bus; none where a system has no such list.

    Args:
        directory: Has a directory for each device, with files "vendor" and "device".
    """
    found = 0
    for vendor in Path(directory).glob("*/vendor"):
        try:
            is_google = vendor.read_text(encoding="ascii").strip() == _GOOGLE
            found += is_google and vendor.with_name("device").read_text(encoding="ascii").strip() in _TPUS
        except OSError:  # it was unplugged, or may not be read: nothing that this process could use
            continue
    return found
