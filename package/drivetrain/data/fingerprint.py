"""A few numbers from a sample or batch, to check whether another process has the same."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.data.batch import map_tensors

Fingerprint: TypeAlias = tuple[str | int | float, ...]
"""Kinds, shapes and some of the values, in order."""

_LEAVES = 16
_VALUES = 16
"""Values taken from a tensor, evenly spaced."""


def fingerprint(value: Any) -> Fingerprint:
    """Return a few numbers from a sample or batch.

    Texts count only if there are no numbers: in a sample they are often paths, which differ between
    machines.
    """
    numbers: list[str | int | float] = []
    texts: list[str] = []
    for leaf in islice(leaves(value), _LEAVES):
        if isinstance(leaf, Tensor):
            numbers += _of_tensor(leaf)
        elif hasattr(leaf, "__array_interface__") and (array := np.array(leaf)).dtype.kind in "biuf":
            numbers += _of_tensor(torch.from_numpy(array))  # numpy's arrays and numbers, images
        elif isinstance(leaf, (bool, int, float)):
            numbers.append(leaf)
        else:
            texts.append(repr(leaf)[:100] if isinstance(leaf, (str, bytes)) else type(leaf).__name__)
    return tuple(numbers or texts)


def of_samples(batch: Batch, count: int, most: int = 4) -> list[Fingerprint]:
    """Return the fingerprints of a batch's first samples, which a batch of another size may have too."""
    return [fingerprint(map_tensors(partial(_row, index, count), batch)) for index in range(min(count, most))]


def _row(index: int, count: int, tensor: Tensor) -> Tensor:
    return tensor[index] if tensor.ndim and tensor.shape[0] == count else tensor


def _of_tensor(tensor: Tensor) -> list[str | int | float]:
    shown: list[str | int | float] = [f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or not tensor.numel():
        return shown
    flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).reshape(-1)
    positions = torch.linspace(0, flat.numel() - 1, min(_VALUES, flat.numel()), device=flat.device).long()
    values = flat[positions]
    shown += (values.double() if values.is_floating_point() else values).tolist()
    return [*shown, float(flat.double().abs().mean())]


def matches(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two fingerprints match: integers exactly, floats to 0.1 % as machines may differ."""
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: str | int | float, other: str | int | float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6) or (one != one and other != other)
    return one == other


def as_text(found: Fingerprint) -> str:
    """Format a fingerprint for a message."""
    texts = [f"{each:.4g}" if isinstance(each, float) else str(each) for each in found[:6]]
    return ", ".join(texts) + (", ..." if len(found) > 6 else "")
