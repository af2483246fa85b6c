"""Weights that are read later, from safetensors files, and only the rows that a process holds.

A module on the meta device has no memory for weights. `load_weights_into` then compares names, shapes and
dtypes with the headers of the files, and leaves a `StoredWeights` with the module. A strategy that shards the
module reads from it, once the shards have their memory.

torch.distributed.checkpoint has a reader of such folders (`HuggingFaceStorageReader`). It reads every file
that is there, instead of those that the index names, keeps a whole file mapped until all of its tensors are
read, and converts dtypes silently.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drivetrain.checkpoint.saving.sharding import Box, is_sharded, local_box
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, os_errors
from drivetrain.checkpoint.weights.dtypes import cast
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import CheckpointError

_PIECE = 32 << 20
"""Bytes of a file that are mapped at a time: as long as a page is mapped, it counts as this process's."""

_STORED = "_drivetrain_stored_weights"


class FileTensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        path: The file.
        name: The tensor's name in it.
        dtype: The stored dtype.
        shape: The stored shape.
        version: `version_of` the file when this was read from its header.
    """

    path: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    version: tuple[int, int, int]


def version_of(path: str) -> tuple[int, int, int]:
    """Return what changes when a file is written again or replaced: its inode, size and time."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class _StoredValue:
    """The value of one name of a module: where it is, and its dtype in the module before any precision."""

    value: FileTensor | Tensor
    dtype: torch.dtype
    what: str


class StoredWeights:
    """The values of a module's parameters and buffers by clean name, which are read when they are needed."""

    def __init__(self, stored: Mapping[str, _StoredValue]) -> None:
        self._stored = stored

    def lacking(self, module: nn.Module) -> tuple[list[str], list[str]]:
        """Return the names of parameters and of buffers without memory that have no stored value.

        A tied parameter needs one under any of its names.
        """
        return self._lacking(module.named_parameters(remove_duplicate=False)), self._lacking(
            module.named_buffers(remove_duplicate=False)
        )

    def _lacking(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        names: dict[int, list[str]] = {}
        for raw, tensor in named:
            if tensor.is_meta:
                names.setdefault(id(tensor), []).append(clean_name(raw))
        return [uses[0] for uses in names.values() if not any(each in self._stored for each in uses)]

    def fill(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Read the values of tensors that have memory: of a `DTensor`, the part that this process holds.

        Args:
            named: The tensors by name, those of a tied parameter under each name.

        Raises:
            CheckpointError: A file has changed or is gone, a number is too large for the dtype, or two names
                of a tied parameter have different values.
        """
        reader = _RowReader()
        filled: dict[int, tuple[str, Tensor]] = {}
        with torch.no_grad():
            for raw, tensor in named:
                name = clean_name(raw)
                if name not in self._stored:
                    continue
                first, _ = filled.setdefault(id(tensor), (name, tensor))
                for part, rows in reader.parts(self._stored[name], tensor):
                    if first == name:
                        part.copy_(rows)
                    elif not same(part, rows.to(part)):
                        raise differ(first, name, self._stored[name].what)
                    del rows  # which keeps the file mapped


class _RowReader:
    """Reads parts of safetensors files, and keeps little of them mapped."""

    def __init__(self) -> None:
        self._path = ""
        self._opened: Any = None
        self._read = 0

    def parts(self, stored: _StoredValue, tensor: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what this process holds of a tensor in pieces, each with its values in the module's dtype."""
        value = stored.value
        offset, shape = local_box(tensor) if is_sharded(tensor) else ((0,) * tensor.ndim, tuple(tensor.shape))
        held = tensor.to_local() if is_sharded(tensor) else tensor
        if not held.numel():
            return
        # A page is read whole, so a part of a row costs as much as the row.
        row = max(1, math.prod(value.shape[1:]) * value.dtype.itemsize)
        step = max(1, _PIECE // row)
        for start in range(0, shape[0] if shape else 1, step):
            part = held[start : start + step] if shape else held
            corner = (offset[0] + start, *offset[1:]) if shape else ()
            yield part, _converted(self._values(value, (corner, tuple(part.shape))), stored)

    def _values(self, value: FileTensor | Tensor, box: Box) -> Tensor:
        index = tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
        if isinstance(value, Tensor):
            return value[index]
        if value.path != self._path or self._read >= _PIECE:
            self._opened, self._path, self._read = None, "", 0
        with os_errors("read", value.path):
            try:
                if self._opened is None:
                    self._opened, self._path = safe_open(value.path, framework="pt"), value.path
                    if version_of(value.path) != value.version:
                        raise SafetensorError("it was written again")
                found = self._opened.get_slice(value.name)
                rows: Tensor = found[index] if index else self._opened.get_tensor(value.name)
            except SafetensorError as error:
                raise DamagedCheckpointError(
                    f"{value.path!r} changed since load_weights read it: {error}"
                ) from error
        self._read += (box[1][0] if index else 1) * math.prod(value.shape[1:]) * value.dtype.itemsize
        return rows


def _converted(rows: Tensor, stored: _StoredValue) -> Tensor:
    if rows.is_floating_point():
        return cast(rows, stored.dtype, stored.what)
    return rows.to(stored.dtype)


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN."""
    return first.shape == second.shape and bool(
        ((first == second) | ((first != first) & (second != second))).all()
    )


def differ(first: str, name: str, what: str) -> CheckpointError:
    """Return the error for two names of one tensor that have different values in a source."""
    return CheckpointError(
        f"{first!r} and {name!r} are one tensor in the module, and differ in {what}. To drop the "
        f"second, give rename={{{'^' + re.escape(name) + '$'!r}: None}}"
    )


def stored_weights(module: nn.Module) -> StoredWeights | None:
    """Return the weights that a module on the meta device is to get, or None."""
    return StoredWeights(module.__dict__[_STORED]) if _STORED in module.__dict__ else None


def leave_weights(
    module: nn.Module, values: Mapping[str, FileTensor | Tensor], own: Mapping[str, Tensor], where: str
) -> None:
    """Leave weights with a module, for the strategy that shards it; they replace earlier ones of their names.

    Args:
        values: By clean name.
        own: The module's tensors by clean name.
        where: The source, for messages.
    """
    stored = module.__dict__.setdefault(_STORED, {})
    for name, value in values.items():
        stored[name] = _StoredValue(value, own[name].dtype, f"{name!r} of {where}")


def forget_weights(module: nn.Module) -> None:
    """Remove the weights that a module has got by now."""
    module.__dict__.pop(_STORED, None)
