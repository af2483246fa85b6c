"""Convert nested Python values to JSON and tensors, and back, exactly.

JSON has too few types for a training state, and pickle runs code from the file. So values that JSON lacks are
written as an object with a single key that begins with "$", a tag from a fixed table:

    {"$tuple": [...]}                 a tuple
    {"$dict": [[key, value], ...]}    a dict with a key that is an int, or that begins with "$"; likewise
    {"$OrderedDict": ...}             and {"$Counter": ...}, which torch's state dicts contain
    {"$int": "-0x1f..."}              an integer beyond 64 bits
    {"$float": "7ff0000000000000"}    infinity or NaN, by its bits (IEEE 754 binary64, big-endian)
    {"$bytes": "..."}                 in base64
    {"$tensor": name}                 a torch.Tensor, stored under that name with the JSON
    {"$array": name}                  a numpy array, likewise
    {"$scalar": name}                 a numpy scalar, likewise
    {"$typed": [name, value]}         another type, where the caller allows some; checkpoints have none
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain, count
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json

MAX_DEPTH = 100
"""The most levels of containers; more would exhaust the interpreter's stack, and is a cycle or an attack."""

_ALLOWED = (
    "allowed are None, bool, int, float, str, bytes, list, tuple, dict (with keys that are str or int), "
    "OrderedDict, Counter, torch.Tensor, and numpy arrays and scalars of numbers"
)
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}
_INT64 = range(-(1 << 63), 1 << 64)


class MalformedError(CheckpointError):
    """JSON that is not a result of `pack`."""


def pack(
    tree: Any,
    check: Callable[[Tensor, str], None],
    typed: Callable[[Any], tuple[str, Any] | None] | None = None,
) -> tuple[Json, dict[str, Tensor]]:
    """Split a tree of values into strict JSON and tensors.

    Types are kept exactly, with one exception: a Parameter becomes a plain tensor. Tensors and arrays are not
    copied: a change before the result is written changes the file.

    Args:
        tree: Any nesting of the types in this module's docstring.
        check: Raises a `CheckpointError` for a tensor, at a path, that cannot be stored.
        typed: Returns the name and the content of a value of another type, or None. If it is given, a key
            of a dict may be any of these values.

    Returns:
        The JSON, and the tensors that it refers to, named after their path in the tree ("optimizer.0.step").

    Raises:
        CheckpointError: A value of another type; names its path and the allowed types.
    """
    packer = _Packer(check, typed)
    return packer.pack(tree, (), 0), packer.tensors


def unpack(value: Json, tensors: Mapping[str, Tensor], typed: Callable[[str, Any], Any] | None = None) -> Any:
    """Rebuild the tree from the result of `pack`. Nothing is imported, looked up by name or evaluated.

    Args:
        value: The JSON.
        tensors: The tensors by name; they are not copied, and numpy arrays share their memory.
        typed: Makes a value of a type that `pack` was given a function for, from its name and content.

    Raises:
        MalformedError: The JSON is not a result of `pack`.
    """
    return _Unpacker(tensors, typed).unpack(value, 0)


def _dotted(path: tuple[object, ...]) -> str:
    # hex, because the interpreter refuses to write very large integers in decimal.
    names = (hex(part) if isinstance(part, int) and part not in _INT64 else str(part) for part in path)
    return ".".join(names) or "the value"


_TO_JSON: dict[type, Callable[[Any], Json]] = {
    **dict.fromkeys((NoneType, bool, str), lambda value: value),
    int: lambda value: value if value in _INT64 else {"$int": hex(value)},
    float: lambda value: value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode("ascii")},
}


class _Packer:
    """The state of one call of `pack`: the tensors found so far."""

    def __init__(
        self, check: Callable[[Tensor, str], None], typed: Callable[[Any], tuple[str, Any] | None] | None
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._check, self._typed = check, typed

    def pack(self, value: Any, path: tuple[object, ...], depth: int) -> Json:
        kind = type(value)  # exact: a subclass would be loaded as its base
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"{_dotted(path[:8])}...: over {MAX_DEPTH} levels deep; does it contain itself?"
            )
        if kind in _TO_JSON:
            return _TO_JSON[kind](value)
        if kind is list:
            return [self.pack(each, (*path, index), depth + 1) for index, each in enumerate(value)]
        if kind is tuple:
            return {"$tuple": self.pack(list(value), path, depth)}
        if kind in _MAPPINGS:
            return self._mapping(value, _MAPPINGS[kind], path, depth)
        if kind is Tensor or kind is nn.Parameter:
            return {"$tensor": self._add(value.detach(), path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            tag = "$array" if kind is np.ndarray else "$scalar"
            return {tag: self._add(_from_numpy(np.asarray(value), path), path)}
        named = None if self._typed is None else self._typed(value)
        if named is not None:
            return {"$typed": [named[0], self.pack(named[1], path, depth + 1)]}
        raise CheckpointError(f"{_dotted(path)}: a {kind.__name__!r} cannot be stored; {_ALLOWED}")

    def _mapping(self, value: Mapping[Any, Any], tag: str, path: tuple[object, ...], depth: int) -> Json:
        for key in value:
            if self._typed is None and type(key) is not str and type(key) is not int:
                raise CheckpointError(f"{_dotted(path)}: key {key!r} is a {type(key).__name__!r}; {_ALLOWED}")
        if tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.pack(each, (*path, key), depth + 1) for key, each in value.items()}
        pairs: list[Json] = []
        for key, each in value.items():
            pairs.append([self.pack(key, path, depth), self.pack(each, (*path, key), depth + 1)])
        return {tag: pairs}

    def _add(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        name = _dotted(path)
        self._check(tensor, name)
        # {"a.b": t} and {"a": {"b": t}} have the same path.
        names = chain([name], (f"{name}#{number}" for number in count(2)))
        name = next(each for each in names if each not in self.tensors)
        self.tensors[name] = tensor
        return name


def _from_numpy(array: np.ndarray[Any, Any], path: tuple[object, ...]) -> Tensor:
    if not array.dtype.isnative:  # of a file's byte order, which torch does not take
        array = array.astype(array.dtype.newbyteorder("="))
    # torch rejects negative strides, and warns of read-only memory.
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise CheckpointError(f"{_dotted(path)}: numpy {array.dtype} cannot be stored; {_ALLOWED}") from error


_FROM_TEXT: dict[str, tuple[str, Callable[[str], Any]]] = {
    # Hexadecimal only: parsing decimal digits takes quadratic time.
    "$int": ("-?0x[0-9a-f]+", lambda text: int(text, 16)),
    "$float": ("[0-9a-f]{16}", lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    "$bytes": ("[A-Za-z0-9+/=]*", lambda text: base64.b64decode(text, validate=True)),
}
"""The form of a text by its tag, and the value that it stands for; ValueError if it stands for none."""

_TAGS = ("$tuple", *_FROM_TEXT, "$tensor", "$array", "$scalar", "$typed", *_MAPPINGS.values())


class _Unpacker:
    """The tensors of one call of `unpack`, and its function for other types."""

    def __init__(self, tensors: Mapping[str, Tensor], typed: Callable[[str, Any], Any] | None) -> None:
        self._tensors, self._typed = tensors, typed

    def unpack(self, value: Json, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedError(f"stored state is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, list):
            return [self.unpack(each, depth + 1) for each in value]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.unpack(each, depth + 1) for key, each in value.items()}
        if len(value) != 1 or tag not in _TAGS:
            raise MalformedError(
                f"stored state has an object with the keys {_short(list(value))}; a tag must be the only "
                f"key, and is one of {', '.join(_TAGS)}"
            )
        return self._tagged(tag, value[tag], depth)

    def _tagged(self, tag: str, content: Json, depth: int) -> Any:
        if tag == "$tuple" and isinstance(content, list):
            return tuple(self.unpack(each, depth + 1) for each in content)
        if tag in _MAPPINGS.values() and isinstance(content, list):
            return self._mapping(tag, content, depth)
        if tag in ("$tensor", "$array", "$scalar"):
            return self._tensor(tag, content)
        if tag == "$typed" and isinstance(content, list) and len(content) == 2 and self._typed is not None:
            return self._typed(str(content[0]), self.unpack(content[1], depth + 1))
        with suppress(ValueError):
            if tag in _FROM_TEXT and isinstance(content, str) and re.fullmatch(_FROM_TEXT[tag][0], content):
                return _FROM_TEXT[tag][1](content)
        raise _wrong(tag, content)

    def _mapping(self, tag: str, pairs: list[Json], depth: int) -> Any:
        result: dict[Any, Any] = next(kind for kind, each in _MAPPINGS.items() if each == tag)()
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _wrong(tag, pairs)
            key = self.unpack(pair[0], depth)
            if (self._typed is None and type(key) not in (str, int)) or key in result:
                raise _wrong(tag, pair[0])
            result[key] = self.unpack(pair[1], depth + 1)
        return result

    def _tensor(self, tag: str, content: Json) -> Any:
        if not isinstance(content, str) or content not in self._tensors:
            raise MalformedError(f"stored state refers to a tensor {_short(content)} that does not exist")
        if tag == "$tensor":
            return self._tensors[content]
        try:
            array = self._tensors[content].numpy()
        except TypeError as error:  # a dtype that numpy lacks
            raise _wrong(tag, content) from error
        if tag == "$scalar" and array.ndim:
            raise _wrong(tag, content)
        return array if tag == "$array" else array[()]


def _wrong(tag: str, content: Json) -> MalformedError:
    return MalformedError(f"stored state has {tag} with {_short(content)}, which is not a valid value")


def _short(value: Json | Iterable[str]) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
