"""Short texts of values: equal for equal bits, different otherwise."""

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

_FULL_BYTES = 64 << 20
"""Arrays of up to this many bytes are hashed completely, larger ones at evenly spaced bytes."""

_FULL_ELEMENTS = 1000
"""Containers of up to this many elements are compared completely, longer ones at both ends."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def short(data: bytes) -> str:
    """Return a hash of some bytes."""
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


def generator_text(generator: Any) -> str | None:
    """Return the state of a random generator as a text, or None for any other object."""
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
    """Return the text of a value that is compared as one piece, or None if its elements are compared."""
    if isinstance(value, Tensor):
        return tensor_text(value)
    if isinstance(value, np.ndarray):
        sampled = (
            value if value.nbytes <= _FULL_BYTES else value.reshape(-1)[:: -(-value.nbytes // _FULL_BYTES)]
        )
        content = (
            repr(sampled).encode() if sampled.dtype.hasobject else np.ascontiguousarray(sampled).tobytes()
        )
        return f"array {value.shape} {short(str(value.dtype).encode() + content)}"
    found = generator_text(value)
    if found is not None:
        return found
    if isinstance(value, (*_PLAIN, np.generic, count, range)):
        text = _plain_text(value)
        return text if len(text) <= 60 else f"{text[:40]}... {short(text.encode())}"
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return _plain_elements(value)
    return None


def _plain_text(value: Any) -> str:
    # Python refuses to write an integer of over 4,300 decimal digits.
    return hex(value) if isinstance(value, int) and value.bit_length() > 10_000 else repr(value)


def _plain_elements(value: Any) -> str | None:
    """Return the text of a container of plain values, or None if it holds others."""
    some = ends(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
    if not all(isinstance(each, (*_PLAIN, np.generic)) for each in some):
        return None
    text = f"[{', '.join(map(_plain_text, some))}]"
    shown = text if len(text) <= 60 else short(text.encode())
    return f"{type(value).__name__} of {len(value)}: {shown}"


def ends(values: Any) -> list[Any]:
    """Return the elements of a container, or those at both ends of a long one."""
    if len(values) <= _FULL_ELEMENTS:
        return list(values)
    if not isinstance(values, (list, tuple, range)):
        values = list(values)
    return [*values[: _FULL_ELEMENTS // 2], *values[-(_FULL_ELEMENTS // 2) :]]


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
