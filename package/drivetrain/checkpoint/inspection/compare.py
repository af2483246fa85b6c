"""Compare two checkpoints: tensors by their hashes, everything else by value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from drivetrain.checkpoint.format.records import TensorRecord, file_name
from drivetrain.checkpoint.inspection.description import mapping, readable
from drivetrain.checkpoint.saving.index import PURPOSE
from drivetrain.checkpoint.saving.reading import Reader, open_checkpoint
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.notebook.html import html_table
from drivetrain.core.types import Json

Kind: TypeAlias = Literal["only in the first", "only in the second", "shape", "dtype", "content"]
"""The kind of a difference; "shape" if both shape and dtype differ."""

_SHOWN = 100  # the most differences in a notebook's table


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """One tensor, number, text or setting that differs.

    Attributes:
        section: For a tensor its group; for another value "progress", "metrics", "saved_by", "hparams",
            "optimizers", or the name of an object.
        name: The tensor's name, or the value's path in the section, with dots between the levels.
        kind: The kind of the difference.
        first: The value in the first checkpoint, or None; see `readable`. A tensor is shown as its dtype and
            shape, such as "F32[2, 3]".
        second: The value in the second checkpoint, or None.
    """

    section: str
    name: str
    kind: Kind
    first: Json = None
    second: Json = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two checkpoints.

    Attributes:
        first: The path of the first.
        second: The path of the second.
        same: The number of bitwise equal tensors.
        tensors: The tensors that differ.
        values: The other differences.
    """

    first: str
    second: str
    same: int
    tensors: tuple[CheckpointDifference, ...]
    values: tuple[CheckpointDifference, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.values

    def _repr_html_(self) -> str:
        """Return the differences as a table, which a notebook shows."""
        found = [*self.tensors, *self.values]
        rows = [(each.section, each.name, each.kind, each.first, each.second) for each in found[:_SHOWN]]
        head = f"{len(rows)} of {len(found)} differences", f"{self.same} tensors are equal", ""
        return html_table((*head, self.first, self.second), rows)


def compare(first: str, second: str) -> Comparison:
    """Compare two checkpoints.

    Tensors that are stored in the same pieces are compared by their hashes; others are read. Times and
    purposes of checkpoints are ignored, because they differ between two equal runs.

    Args:
        first: A checkpoint, not a run directory.
        second: Another checkpoint.

    Raises:
        DamagedCheckpointError: A checkpoint is damaged.
        CheckpointError: A checkpoint cannot be read.
    """
    left, right = _Side(open_checkpoint(first)), _Side(open_checkpoint(second))
    names = dict.fromkeys([*left.names(), *right.names()])
    tensors = [_compare_tensors(left, right, *each) for each in names]
    differing = tuple(each for each in tensors if each is not None)
    same = len(tensors) - len(differing)
    return Comparison(first, second, same, differing, tuple(_compare_values(left, right)))


class _Side:
    """One of the two checkpoints."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._records = reader.manifest.tensors
        self._hashes: dict[str, dict[str, str]] = {}

    def names(self) -> list[tuple[str, str]]:
        return [(group, name) for group, names in self._records.items() for name in names]

    def record(self, group: str, name: str) -> TensorRecord | None:
        """Return a tensor's record in the manifest, or None."""
        return self._records.get(group, {}).get(name)

    def hashes(self, group: str, name: str) -> dict[tuple[tuple[int, ...], tuple[int, ...]], str]:
        """Return the hash of each piece of a tensor, by offset and shape."""
        found = {}
        for number, offset, shape in self._records[group][name].pieces:
            file = file_name(group, number, self._reader.manifest.processes)
            if file not in self._hashes:
                self._hashes[file] = self._reader.hashes(file).tensors
            if name not in self._hashes[file]:
                raise DamagedCheckpointError(f"{self._reader.path!r}: {file} has no hash of {name!r}")
            found[offset, shape] = self._hashes[file][name]
        return found

    def tensor(self, group: str, name: str) -> Tensor:
        """Read and verify a tensor."""
        return self._reader.tensor(group, name)

    def sections(self) -> dict[str, Json]:
        """Return everything except the tensors."""
        manifest = self._reader.manifest
        objects = {name: self._reader.object(name) for name in manifest.objects() if name != PURPOSE}
        progress = {name: count for name, count in manifest.progress.items() if name != "seconds"}
        metrics: dict[str, Json] = dict(manifest.metrics)
        saved_by: dict[str, Json] = dict(manifest.saved_by)
        hparams = mapping(objects.pop("hparams", None))
        state = objects.get("state")
        optimizers: dict[str, Json] = {}
        if isinstance(state, dict):
            optimizers = mapping(state.get("optimizers"))
            # "timing" is the run's duration, and "metrics" repeats those of the manifest.
            others = ("timing", "metrics", "optimizers")
            objects["state"] = {name: value for name, value in state.items() if name not in others}
        return {
            "progress": progress,
            "metrics": metrics,
            "saved_by": saved_by,
            "hparams": {**mapping(hparams.get("values")), **mapping(hparams.get("dataclasses"))},
            "unstored": hparams.get("unstored", []),
            "optimizers": optimizers,
            **objects,
        }


def _compare_tensors(left: _Side, right: _Side, group: str, name: str) -> CheckpointDifference | None:
    """Return the difference between two tensors, or None."""
    mine, theirs = left.record(group, name), right.record(group, name)
    kind: Kind = "content"
    if mine is None or theirs is None:
        kind = "only in the first" if theirs is None else "only in the second"
    elif mine.shape != theirs.shape:
        kind = "shape"
    elif mine.dtype != theirs.dtype:
        kind = "dtype"
    elif _has_same_content(left, right, group, name):
        return None
    shown = (None if each is None else each.text for each in (mine, theirs))
    return CheckpointDifference(group, name, kind, *shown)


def _has_same_content(left: _Side, right: _Side, group: str, name: str) -> bool:
    boxes, others = (each.hashes(group, name) for each in (left, right))
    if boxes.keys() == others.keys():
        return boxes == others
    return torch.equal(_bits(left.tensor(group, name)), _bits(right.tensor(group, name)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _compare_values(left: _Side, right: _Side) -> Iterator[CheckpointDifference]:
    ours, theirs = left.sections(), right.sections()
    for section in dict.fromkeys([*ours, *theirs]):
        if (kind := _kind(section, ours, theirs)) == "content":
            yield from _differences(section, ours[section], theirs[section])
        else:
            both = (readable(each.get(section)) for each in (ours, theirs))
            yield CheckpointDifference(section, "", kind, *both)


def _kind(name: str, left: Collection[str], right: Collection[str]) -> Kind:
    if name not in right:
        return "only in the first"
    return "content" if name in left else "only in the second"


def _differences(section: str, first: Json, second: Json) -> list[CheckpointDifference]:
    """Return a section's differences in the form for people or, if there are none, in the stored form."""
    forms: tuple[Callable[[Json], Json], ...] = (readable, lambda value: value)
    for form in forms:
        left, right = dict(_flat(form(first), "")), dict(_flat(form(second), ""))
        found = [
            CheckpointDifference(section, name, kind, left.get(name), right.get(name))
            for name in dict.fromkeys([*left, *right])
            # As text: then NaN equals NaN, 1 is neither 1.0 nor true, and 0.0 is not -0.0.
            if (kind := _kind(name, left, right)) != "content" or repr(left[name]) != repr(right[name])
        ]
        if found:
            return found
    return []


def _flat(value: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Yield every number, text and empty container with its path."""
    if isinstance(value, (dict, list)) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    elif path or not isinstance(value, (dict, list)):
        yield path, value
