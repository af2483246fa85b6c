"""Short texts of values: equal for equal bits, different otherwise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.format.tree import pack
from drivetrain.core.containers import opened

_FULL_BYTES = 64 << 20
"""Arrays of up to this many bytes are hashed completely, larger ones at evenly spaced bytes."""


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


def digest(state: Any) -> str:
    """Return a hash of a state that a checkpoint can hold."""
    packed, tensors = pack(state)
    return short(json.dumps([packed, [*map(tensor_text, tensors.values())]]).encode())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield local(value).cpu()
        return
    container = opened(value)
    entries = getattr(value, "__dict__", {}).values() if container is None else container.entries
    for each in entries:
        yield from _tensors(each)


def batch_texts(batch: Any) -> list[str]:
    """Return a text for each sample of a batch, or one for the batch if its tensors differ in length."""
    tensors = list(_tensors(batch))
    sizes = {each.shape[0] for each in tensors if each.ndim}
    if len(sizes) == 1 and all(each.ndim for each in tensors):
        return [short(b"".join(_bytes(each[row]) for each in tensors)) for row in range(sizes.pop())]
    return [short(b"".join(map(_bytes, tensors)))]
