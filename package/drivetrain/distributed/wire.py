"""Values between ranks as JSON and the bytes of tensors. Nothing is unpickled.

A value keeps its type. A class is found by its name among the modules that this process has imported, and
only a data class, a named tuple, a container, an enumeration or an error is made.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections import UserDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import CheckpointError, RankFailure
from drivetrain.distributed.tree import pack, unpack

_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor": (Tensor, lambda value: value.as_subclass(Tensor), lambda content: content),
    "path": (PurePath, str, Path),
    "text": (str, str, str),
    "bytes": (bytes, bytes, bytes),
    "number": (float, float, float),
    "integer": (int, int, int),
    "complex": (complex, lambda value: [value.real, value.imag], lambda content: complex(*content)),
    "decimal": (Decimal, str, Decimal),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda value: [[*value], value.maxlen], lambda content: deque(*content)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda content: range(*content)),
    "size": (torch.Size, list, torch.Size),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda content: _dtype(content)),
}
"""Types by a name of their own: what is sent of a value, and what makes a value of it."""


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        CheckpointError: Something in it cannot be sent; names its path and type.
    """
    content, tensors = pack(value, _check, _typed)
    parts = {name: each.detach().cpu().resolve_conj().resolve_neg() for name, each in tensors.items()}
    shapes = [[name, str(each.dtype).removeprefix("torch."), [*each.shape]] for name, each in parts.items()]
    header = json.dumps([content, shapes]).encode()
    # A copy: a column of one row counts as contiguous, and keeps its stride.
    flat = [each.reshape(-1).clone(memory_format=torch.contiguous_format) for each in parts.values()]
    data = [each.view(torch.uint8).numpy().tobytes() for each in flat]
    return b"".join([struct.pack("<Q", len(header)), header, *data])


def decode(data: bytes) -> Any:
    """Return a value from the bytes of `encode`.

    Raises:
        RankFailure: They are no such bytes, or name a class that cannot be sent or is not imported here.
    """
    try:
        end = 8 + struct.unpack_from("<Q", data)[0]
        content, shapes = json.loads(data[8:end])
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in shapes:
            values = torch.empty(shape, dtype=_dtype(dtype))
            start, end = end, end + values.nbytes
            if values.nbytes:
                part = torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8)
                values = part.view(values.dtype).reshape(shape)
            tensors[name] = values
        return unpack(content, tensors, _made)
    except (ValueError, TypeError, LookupError, AttributeError, struct.error, CheckpointError) as error:
        raise RankFailure(f"a message of another rank cannot be read: {error}") from error


def _check(tensor: Tensor, path: str) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(f"{path}: a tensor of layout {tensor.layout} on {tensor.device} cannot be sent")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found


def _typed(value: Any) -> tuple[str, Any] | None:
    """Return the name of a value's type and what is sent of the value; None for a type that is not sent."""
    kind: Any = type(value)
    way = _way(kind)
    return None if way is None else (way[0], way[1](value))


@lru_cache(maxsize=1024)
def _way(kind: type) -> tuple[str, Callable[[Any], Any]] | None:
    take: Callable[[Any], Any]
    if issubclass(kind, Enum):
        take = attrgetter("value")
    elif issubclass(kind, BaseException):
        take = lambda value: [list(value.args), dict(vars(value))]  # noqa: E731
    elif dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind)]
        take = lambda value: {name: getattr(value, name) for name in names}  # noqa: E731
    else:
        for short, (base, content, _) in _PLAIN.items():
            if issubclass(kind, base):
                return (short, content) if not hasattr(kind, "to_local") else None
        if not issubclass(kind, (tuple, list, dict, UserDict)):
            return None
        take = list if issubclass(kind, (tuple, list)) else dict
    name = f"{kind.__module__}:{kind.__qualname__}"
    with suppress(LookupError, AttributeError):  # a class inside of a function, which others cannot find
        return (name, take) if _found(name) is kind else None
    return None


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for each in path.split("."):
        found = getattr(found, each)
    return found


def _made(name: str, content: Any) -> Any:
    if name in _PLAIN:
        return _PLAIN[name][2](content)
    kind: Any = _found(name)
    made: Any
    if not isinstance(kind, type):
        raise TypeError(f"{name} is no class")
    if issubclass(kind, Enum):
        return kind(content)
    if issubclass(kind, BaseException):
        made = kind.__new__(kind, *content[0])
        made.__dict__.update(content[1])
    elif dataclasses.is_dataclass(kind):
        if issubclass(kind, Mapping):
            return kind(**content)
        made = object.__new__(kind)
        for field, each in content.items():
            object.__setattr__(made, field, each)  # not by its constructor, which may convert values
    elif issubclass(kind, tuple):
        # Named tuples of C, such as torch.return_types.max, have a constructor of one sequence.
        made = kind(content) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, content)
    elif issubclass(kind, list):
        made = list.__new__(kind)
        list.extend(made, content)
    elif issubclass(kind, dict):
        made = dict.__new__(kind)
        dict.update(made, content)
    elif issubclass(kind, UserDict):
        made = kind(content)
    else:
        raise TypeError(f"a {name} cannot be sent")
    return made
