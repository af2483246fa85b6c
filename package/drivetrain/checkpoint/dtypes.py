"""Changing the dtype of weights: names of dtypes, and a conversion that loses no number."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.errors import CheckpointError, ConfigError, nearest

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
"""The dtypes that weights can be converted to. Not 8 bits: these need a scale for each tensor."""


def floating_dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that a user means; None stays None.

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
    """Refuse a conversion that would make a finite number infinite.

    Args:
        tensor: Of floating-point numbers, on any device; not copied.
        dtype: One of `FLOATS`.
        what: What to call it in the message.

    Raises:
        CheckpointError: There is such a number.
    """
    if not tensor.numel() or torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return
    # The two ends tell it of all between.
    for end in torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float()):
        if end.isfinite() and not end.to(dtype).isfinite():
            raise CheckpointError(
                f"{what} has the number {end.item():g}, but {dtype} ends at {torch.finfo(dtype).max:g}. "
                "Choose a dtype with a larger range, such as 'bf16'"
            )


def cast(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """The tensor in another floating-point dtype, rounded to nearest; itself if it has it already.

    Raises:
        CheckpointError: See `check_range`.
    """
    if tensor.dtype == dtype:
        return tensor
    check_range(tensor, dtype, what)
    return tensor.to(dtype)
