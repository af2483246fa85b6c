"""What differs between two checkpoints, told from their manifests as far as these can tell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.reading import Reader
from drivetrain.checkpoint.records import TensorRecord
from drivetrain.types import Json


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same.

    Attributes:
        group: Its group.
        name: Its name.
        first: What it is in the first checkpoint, such as "F32[64, 10]"; None where it is not.
        second: Likewise in the second.
        largest: The largest absolute difference of two elements, if values were asked for and the shapes are
            the same; NaN where only one of two is NaN.
        relative: The norm of the difference over the norm of the first, likewise.
    """

    group: str
    name: str
    first: str | None
    second: str | None
    largest: float | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints side by side.

    Attributes:
        tensors: Those that differ.
        same: How many are the same, to the bit.
        values: What differs of everything else: place to the two values, None where there is none.
    """

    tensors: list[TensorDifference]
    same: int
    values: dict[str, tuple[Json, Json]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.tensors or self.values)


def compare(first: str, second: str, *, values: bool = False) -> Comparison:
    """Compare two checkpoints.

    Tensors that are stored in the same pieces are compared by their hashes; others are read, one at a time.

    Args:
        first: A checkpoint.
        second: Another.
        values: Measure how far the tensors that differ are apart, for which they are read.

    Raises:
        DamagedCheckpointError: One of them is no good.
        CheckpointError: One of them cannot be read.
    """
    left, right = (open_checkpoint(path) for path in (first, second))
    different: list[TensorDifference] = []
    same = 0
    for group, name in _names(left, right):
        mine, theirs = (each.manifest.tensors.get(group, {}).get(name) for each in (left, right))
        if mine is not None and theirs is not None and _is_same(left, right, group, name):
            same += 1
            continue
        apart: tuple[float | None, float | None] = (None, None)
        if values and mine is not None and theirs is not None and mine.shape == theirs.shape:
            apart = _distance(left.tensor(group, name), right.tensor(group, name))
        different.append(TensorDifference(group, name, _text(mine), _text(theirs), *apart))
    flat = [dict(_flat(_rest(each), "")) for each in (left, right)]
    changed = {
        place: (flat[0].get(place), flat[1].get(place))
        for place in dict.fromkeys([*flat[0], *flat[1]])
        if place not in flat[0] or place not in flat[1] or flat[0][place] != flat[1][place]
    }
    return Comparison(different, same, changed)


def open_checkpoint(path: str) -> Reader:
    """A checkpoint, its manifest read; `path` is exact, not a run directory.

    Raises:
        DamagedCheckpointError: It is none, or a damaged one.
        CheckpointError: It cannot be read.
    """
    files = file_system(path)
    return Reader(files, files.absolute(path))


def _names(*readers: Reader) -> list[tuple[str, str]]:
    """Every group and name, in the order of the first, then what only the second has."""
    return list(
        dict.fromkeys(
            (group, name)
            for reader in readers
            for group, names in reader.manifest.tensors.items()
            for name in names
        )
    )


def _text(record: TensorRecord | None) -> str | None:
    return None if record is None else f"{record.dtype}{list(record.shape)}"


def _is_same(left: Reader, right: Reader, group: str, name: str) -> bool:
    mine, theirs = (each.manifest.tensors[group][name] for each in (left, right))
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return False
    boxes, others = (
        {(piece.offset, piece.shape): piece.xxh3_128 for piece in each.pieces} for each in (mine, theirs)
    )
    if boxes.keys() == others.keys():
        return boxes == others
    return torch.equal(_bits(left.tensor(group, name)), _bits(right.tensor(group, name)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(first: Tensor, second: Tensor) -> tuple[float, float]:
    wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    left, right = first.to(wide), second.to(wide)
    # Not the difference alone: that of two infinities is NaN.
    apart = torch.where(left == right, torch.zeros_like(left), left - right).abs()
    norm, largest = left.norm().item(), apart.max().item() if apart.numel() else 0.0
    if not norm:
        return largest, math.inf if largest else 0.0
    return largest, apart.norm().item() / norm


def _rest(reader: Reader) -> dict[str, Json]:
    manifest = reader.manifest
    metrics: dict[str, Json] = {name: repr(value) for name, value in manifest.metrics.items()}
    saved_by: dict[str, Json] = dict(manifest.saved_by)
    objects: dict[str, Json] = {name: reader.object(name) for name in manifest.objects()}
    return {"progress": manifest.progress, "metrics": metrics, "saved_by": saved_by, **objects}


def _flat(value: Json, place: str) -> Iterator[tuple[str, Json]]:
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _flat(each, f"{place}.{key}" if place else str(key))
    else:
        yield place, value
