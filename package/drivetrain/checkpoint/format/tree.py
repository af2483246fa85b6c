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
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.checkpoint.format.tensors import check_tensor
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError, DrivetrainError
from drivetrain.core.types import Json

MAX_DEPTH = 100
"""The most levels of containers; more would exhaust the interpreter's stack, and is a cycle or an attack."""

_ALLOWED = (
    "allowed are None, bool, int, float, str, bytes, list, tuple, dict (with keys that are str or int), "
    "OrderedDict, Counter, torch.Tensor, and numpy arrays and scalars of numbers"
)
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}
_INT64 = range(-(1 << 63), 1 << 64)


def pack(tree: Any) -> tuple[Json, dict[str, Tensor]]:
    """Split a tree of values into strict JSON and tensors.

    Types are kept exactly, with one exception: a Parameter becomes a plain tensor. Tensors and arrays are not
    copied: a change before the result is written changes the file.

    Args:
        tree: Any nesting of the types in this module's docstring.

    Returns:
        The JSON, and the tensors that it refers to, named after their place in the tree ("optimizer.0.step").

    Raises:
        CheckpointError: A value of another type; names its place and the allowed types.
    """
    packer = _Packer()
    return packer.pack(tree, (), 0), packer.tensors


def unpack(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the tree from the result of `pack`. Nothing is imported, looked up by name or evaluated.

    Args:
        value: The JSON.
        tensors: The tensors by name; they are not copied, and numpy arrays share their memory.

    Raises:
        DamagedCheckpointError: The JSON is not a result of `pack`.
    """
    return _unpacked(value, tensors, 0)


@contextmanager
def well_formed(what: str) -> Iterator[None]:
    """Run the block, which loads a file's content, with its errors turned into one of ours."""
    try:
        yield
    except DrivetrainError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{what} could not be loaded: {type(error).__name__}: {error}. It has another structure than the"
            " saved one, or the code that loads it is wrong"
        ) from error


def _place(path: tuple[object, ...]) -> str:
    # hex, because the interpreter refuses to write very large integers in decimal.
    names = (hex(part) if isinstance(part, int) and part not in _INT64 else str(part) for part in path)
    return ".".join(names) or "the value"


class _Packer:
    """The state of one call of `pack`: the tensors found so far."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def pack(self, value: Any, path: tuple[object, ...], depth: int) -> Json:
        kind = type(value)  # exact: a subclass would be loaded as its base
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"{_place(path[:8])}...: nested more than {MAX_DEPTH} levels deep; does it contain itself?"
            )
        if value is None or kind is bool or kind is str:
            return value  # type: ignore[no-any-return]
        if kind is int:
            return value if value in _INT64 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
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
        raise CheckpointError(f"{_place(path)}: a {kind.__name__!r} cannot be stored; {_ALLOWED}")

    def _mapping(self, value: Mapping[Any, Any], tag: str, path: tuple[object, ...], depth: int) -> Json:
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise CheckpointError(
                    f"{_place(path)}: the key {key!r} is a {type(key).__name__!r}; {_ALLOWED}"
                )
        if tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.pack(each, (*path, key), depth + 1) for key, each in value.items()}
        pairs: list[Json] = []
        for key, each in value.items():
            pairs.append([self.pack(key, path, depth), self.pack(each, (*path, key), depth + 1)])
        return {tag: pairs}

    def _add(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        place = _place(path)
        check_tensor(tensor, place)
        # {"a.b": t} and {"a": {"b": t}} have the same place.
        names = chain([place], (f"{place}#{number}" for number in count(2)))
        name = next(each for each in names if each not in self.tensors)
        self.tensors[name] = tensor
        return name


def _from_numpy(array: np.ndarray[Any, Any], path: tuple[object, ...]) -> Tensor:
    # torch rejects negative strides, and warns of read-only memory.
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise CheckpointError(
            f"{_place(path)}: a numpy value of dtype {array.dtype} cannot be stored; {_ALLOWED}"
        ) from error


_FROM_TEXT: dict[str, tuple[str, Callable[[str], Any]]] = {
    # Hexadecimal only: parsing decimal digits takes quadratic time.
    "$int": ("-?0x[0-9a-f]+", lambda text: int(text, 16)),
    "$float": ("[0-9a-f]{16}", lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    "$bytes": ("[A-Za-z0-9+/=]*", lambda text: base64.b64decode(text, validate=True)),
}
"""The form of a text by its tag, and the value that it stands for; ValueError if it stands for none."""

_TAGS = ("$tuple", *_FROM_TEXT, "$tensor", "$array", "$scalar", *_MAPPINGS.values())


def _unpacked(value: Json, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise DamagedCheckpointError(f"stored state is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_unpacked(each, tensors, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _unpacked(each, tensors, depth + 1) for key, each in value.items()}
    if len(value) != 1 or tag not in _TAGS:
        raise DamagedCheckpointError(
            f"stored state has an object with the keys {_short(list(value))}; a tag must be the only "
            f"key, and is one of {', '.join(_TAGS)}"
        )
    content = value[tag]
    if tag == "$tuple" and isinstance(content, list):
        return tuple(_unpacked(each, tensors, depth + 1) for each in content)
    if tag in _MAPPINGS.values() and isinstance(content, list):
        return _mapping(tag, content, tensors, depth)
    if tag in ("$tensor", "$array", "$scalar"):
        return _tensor(tag, content, tensors)
    with suppress(ValueError):
        if tag in _FROM_TEXT and isinstance(content, str) and re.fullmatch(_FROM_TEXT[tag][0], content):
            return _FROM_TEXT[tag][1](content)
    raise _wrong(tag, content)


def _mapping(tag: str, pairs: list[Json], tensors: Mapping[str, Tensor], depth: int) -> Any:
    result: dict[Any, Any] = next(kind for kind, each in _MAPPINGS.items() if each == tag)()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _wrong(tag, pairs)
        key = _unpacked(pair[0], tensors, depth)
        if type(key) not in (str, int) or key in result:
            raise _wrong(tag, pair[0])
        result[key] = _unpacked(pair[1], tensors, depth + 1)
    return result


def _tensor(tag: str, content: Json, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(content, str) or content not in tensors:
        raise DamagedCheckpointError(f"stored state refers to a tensor {_short(content)} that does not exist")
    if tag == "$tensor":
        return tensors[content]
    try:
        array = tensors[content].numpy()
    except TypeError as error:  # a dtype that numpy lacks
        raise _wrong(tag, content) from error
    if tag == "$scalar" and array.ndim:
        raise _wrong(tag, content)
    return array if tag == "$array" else array[()]


def _wrong(tag: str, content: Json) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"stored state has {tag} with {_short(content)}, which is not a valid value"
    )


def _short(value: Json | Iterable[str]) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
