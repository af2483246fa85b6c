"""Short texts of values, alike for the same bits and for no others."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WHOLE = 64 << 20
"""Bytes up to which an array is looked at whole; of a larger one every so many bytes are."""

_MANY = 1000
"""Elements up to which a container is looked at whole; of a longer one the two ends are."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def short(data: bytes) -> str:
    """A hash of some bytes."""
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def _bytes(tensor: Tensor) -> bytes:
    if tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        step = -(-flat.numel() // _WHOLE) if flat.numel() > _WHOLE else 1
        return flat[::step].numpy().tobytes()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _bytes(tensor.indices()) + _bytes(tensor.values())
    if hasattr(tensor, "__tensor_flatten__"):  # of a subclass, such as quantised states
        names, _ = tensor.__tensor_flatten__()
        return b"".join(_bytes(getattr(tensor, name)) for name in names)
    return repr(tensor).encode()


def tensor_text(tensor: Tensor) -> str:
    """A tensor: a single number as itself, others by their norm and a hash."""
    tensor = local(tensor)
    if tensor.device.type == "meta":
        return f"{tuple(tensor.shape)} without values"
    if tensor.numel() == 1 and not tensor.is_sparse:
        return f"{tensor.item()!r}"
    where = f"{tuple(tensor.shape)} {short(str(tensor.dtype).encode() + _bytes(tensor))}"
    if tensor.is_floating_point() and tensor.numel() <= _WHOLE and not tensor.is_sparse:
        return f"norm {tensor.float().norm().item():.9g}, {where}"
    return where


def generator_text(generator: Any) -> str | None:
    """Where a generator of random numbers stands; None for what is none."""
    if isinstance(generator, random.Random):
        state = () if isinstance(generator, random.SystemRandom) else generator.getstate()
        return f"random.Random at {short(repr(state).encode())}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator at {short(_state(generator.bit_generator.state))}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy.random.RandomState at {short(_state(generator.get_state()))}"
    if isinstance(generator, torch.Generator):
        return f"torch.Generator at {short(generator.get_state().numpy().tobytes())}"
    return None


def _state(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return b";".join(key.encode() + _state(each) for key, each in value.items())
    if isinstance(value, tuple):
        return b",".join(map(_state, value))
    return repr(value).encode()


def leaf_text(value: Any) -> str | None:
    """What stands for a value that is looked at as a whole; None for what is to be walked through."""
    if isinstance(value, Tensor):
        return tensor_text(value)
    if isinstance(value, np.ndarray):
        kept = value if value.nbytes <= _WHOLE else value.reshape(-1)[:: -(-value.nbytes // _WHOLE)]
        content = repr(kept).encode() if kept.dtype.hasobject else np.ascontiguousarray(kept).tobytes()
        return f"array {value.shape} {short(str(value.dtype).encode() + content)}"
    found = generator_text(value)
    if found is not None:
        return found
    if isinstance(value, (*_PLAIN, np.generic, count, range)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:40]}... {short(text.encode())}"
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return _plain_elements(value)
    return None


def _plain_elements(value: Any) -> str | None:
    """A container of numbers and texts, in one word; None where there is more in it."""
    some = ends(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
    if not all(isinstance(each, (*_PLAIN, np.generic)) for each in some):
        return None
    text = repr(some)
    shown = text if len(text) <= 60 else short(text.encode())
    return f"{type(value).__name__} of {len(value)}: {shown}"


def ends(values: Any) -> list[Any]:
    """The elements of a container; of a long one those at both ends."""
    if len(values) <= _MANY:
        return list(values)
    if not isinstance(values, (list, tuple, range)):
        values = list(values)
    return [*values[: _MANY // 2], *values[-(_MANY // 2) :]]


def batch_texts(batch: Any) -> list[str]:
    """A text for each sample of a batch: of all tensors that have as many rows; else one for the batch."""
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
