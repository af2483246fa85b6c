"""Short texts of values: equal for equal bits, different otherwise."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FULL_BYTES = 64 << 20
"""Arrays of up to this many bytes are hashed completely, larger ones at evenly spaced bytes."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def _bytes(tensor: Tensor) -> bytes:
    if tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        step = -(-flat.numel() // _FULL_BYTES) if flat.numel() > _FULL_BYTES else 1
        return flat[::step].numpy().tobytes()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _bytes(tensor.indices()) + _bytes(tensor.values())
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass, such as quantised states
        names, _ = tensor.__tensor_flatten__()
        return b"".join(_bytes(getattr(tensor, name)) for name in names)
    return repr(tensor).encode()


def tensor_text(tensor: Tensor) -> str:
    """Return a tensor's text: the value of a single number, otherwise shape, norm and hash."""
    tensor = local(tensor)
    if tensor.device.type == "meta":
        return f"{tuple(tensor.shape)} without values"
    if tensor.numel() == 1 and not tensor.is_sparse:
        return f"{tensor.item()!r}"
    where = f"{tuple(tensor.shape)} {short(str(tensor.dtype).encode() + _bytes(tensor))}"
    if tensor.is_floating_point() and tensor.numel() <= _FULL_BYTES and not tensor.is_sparse:
        return f"norm {tensor.float().norm().item():.9g}, {where}"
    return where


def digest(value: Any) -> str:
    """Return a hash of a nested state. An object that holds neither numbers nor text counts by its type."""
    parts: list[str] = []

    def walk(each: Any) -> None:
        if isinstance(each, Tensor):
            parts.append(tensor_text(each))
        elif isinstance(each, np.ndarray):
            content = repr(each).encode() if each.dtype.hasobject else np.ascontiguousarray(each).tobytes()
            parts.append(f"{each.shape} {each.dtype} {short(content)}")
        elif isinstance(each, Mapping):
            for key in each:
                parts.append(str(key))
                walk(each[key])
        elif isinstance(each, (list, tuple, deque)):
            for inner in each:
                walk(inner)
        elif isinstance(each, (set, frozenset)):
            parts.append(repr(sorted(each, key=repr)))
        else:
            parts.append(repr(each) if isinstance(each, (*_PLAIN, np.generic)) else type(each).__name__)

    walk(value)
    return short("\n".join(parts).encode())


def batch_texts(batch: Any) -> list[str]:
    """Return a text for each sample of a batch, or one for the batch if its tensors differ in length."""
    tensors: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(local(value).cpu())
        elif isinstance(value, Mapping):
            for each in value.values():
                collect(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                collect(each)
        elif hasattr(value, "__dict__"):
            collect(vars(value))

    collect(batch)
    sizes = {each.shape[0] for each in tensors if each.ndim}
    if len(sizes) == 1 and all(each.ndim for each in tensors):
        return [short(b"".join(_bytes(each[row]) for each in tensors)) for row in range(sizes.pop())]
    return [short(b"".join(map(_bytes, tensors)))]
