"""Advice for a fit on an NVIDIA GPU: options that would make it faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain.core.messages import logger
from drivetrain.strategies.precision.base import Precision

_LOG = logger(__name__)
_AMPERE = (8, 0)

_told: set[str] = set()


def advise(device: torch.device, precision: Precision, model: nn.Module, compiled: bool) -> None:
    """Log each piece of advice that applies, once in a process."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    for each in advice(torch.cuda.get_device_capability(device), precision, model, compiled):
        if each not in _told:
            _told.add(each)
            _LOG.info(each)


def advice(capability: tuple[int, int], precision: Precision, model: nn.Module, compiled: bool) -> list[str]:
    """Return the advice for a fit."""
    found = []
    matmul: Any = torch.backends.cuda.matmul
    is_float32 = precision.compute_dtype is None and precision.param_dtype is None
    if is_float32 and capability >= _AMPERE and matmul.fp32_precision != "tf32":
        found.append(
            "products of float32 matrices run without TF32 here. precision='tf32' makes them several times as"
            " fast and keeps 10 bits of mantissa; 'bf16-mixed' is faster still"
        )
    if precision.dtypes.compute.startswith("float8") and not compiled:
        found.append("fp8 without compilation is slower than 'bf16-mixed': give Trainer(compile=True)")
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Conv2d)]
    placed = all(each.is_contiguous(memory_format=torch.channels_last) for each in weights)
    if not placed and not torch.backends.cudnn.benchmark:
        found.append(
            "convolutions are faster with task.to(memory_format=torch.channels_last) and, for batches of one"
            " size, torch.backends.cudnn.benchmark = True; both change the last digits"
        )
    return found
