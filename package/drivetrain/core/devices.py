"""Numbers of the host on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor of shape (n,) on a device, without waiting for what the device still does.

    `torch.tensor(..., device="cuda")` copies from memory that is not pinned, and so waits for all work that
    was given to the device before. torch keeps the pinned memory until the copy is made.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values: those on the meta device and a plan's fake ones have none."""
    return not (tensor.is_meta or type(tensor).__name__ == "FakeTensor")  # its module is slow to import
