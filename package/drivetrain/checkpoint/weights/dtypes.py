"""Dtypes of weights: their names, and a conversion that never overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.core.errors import CheckpointError, ConfigError, nearest

FLOATS: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""The dtypes that weights can be converted to. 8 bits are excluded: they need a scale per tensor."""


def floating_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name or dtype; None for None.

    Raises:
        ConfigError: Not one of `FLOATS`.
    """
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or name not in FLOATS:
        raise ConfigError(f"weights cannot be converted to the dtype {value!r}. {nearest(name, FLOATS)}")
    return FLOATS[name]


def check_range(tensor: Tensor, dtype: torch.dtype, what: str) -> None:
    """Check that a conversion makes no finite number infinite.

    Args:
        tensor: A floating-point tensor on any device; not copied.
        dtype: One of `FLOATS`.
        what: The tensor's name for the message.

    Raises:
        CheckpointError: A number is out of the range of the dtype.
    """
    if not tensor.numel() or torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return
    # If the two extremes fit, all others do.
    for end in torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float()):
        if end.isfinite() and not end.to(dtype).isfinite():
            raise CheckpointError(
                f"{what} has the number {end.item():g}, but the largest of {dtype} is"
                f" {torch.finfo(dtype).max:g}. "
                "Choose a dtype with a larger range, such as 'bf16'"
            )


def cast(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Return the tensor in a floating-point dtype, rounded to nearest; itself if it already has that dtype.

    Raises:
        CheckpointError: See `check_range`.
    """
    if tensor.dtype == dtype:
        return tensor
    check_range(tensor, dtype, what)
    return tensor.to(dtype)
