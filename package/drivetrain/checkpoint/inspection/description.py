"""Describe one checkpoint from its manifest and JSON files; no tensor is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drivetrain.checkpoint.format.records import TensorRecord
from drivetrain.checkpoint.format.tensors import DTYPES
from drivetrain.checkpoint.format.tree import unpack
from drivetrain.checkpoint.saving.index import PURPOSE
from drivetrain.checkpoint.saving.reading import Reader
from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json


@dataclass(frozen=True, slots=True)
class CheckpointTotals:
    """The totals of a group of tensors.

    Attributes:
        dtypes: The number of elements by dtype, as safetensors names it ("F32", "BF16").
    """

    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimizer in a checkpoint.

    Attributes:
        groups: The settings of each parameter group; "parameters" is their number.
    """

    optimizer: str
    groups: list[dict[str, Json]]


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a checkpoint. Values that JSON lacks are in a form for people; see `readable`.

    Attributes:
        saved_by: Versions, and the task's name.
        purpose: Its purpose and its position in the order; empty if no manager saved it.
        unstored: The names of arguments that a file cannot store.
        files: The size of each file in bytes, except the assets and the files of hashes.
        assets: The size of each file stored beside the weights.
    """

    path: str
    format_version: int
    saved_by: dict[str, str]
    progress: dict[str, Json]
    metrics: dict[str, float]
    purpose: dict[str, Json]
    hparams: dict[str, Json]
    unstored: list[str]
    optimizers: dict[str, OptimizerSettings]
    files: dict[str, int]
    assets: dict[str, int]
    groups: dict[str, CheckpointTotals] = field(default_factory=dict)


def describe(reader: Reader) -> Description:
    """Describe a checkpoint."""
    manifest = reader.manifest
    objects = {name: reader.object(name) for name in manifest.objects()}
    hparams = mapping(objects.get("hparams"))
    unstored = hparams.get("unstored")
    return Description(
        path=reader.path,
        format_version=manifest.format_version,
        saved_by=dict(manifest.saved_by),
        progress=dict(manifest.progress),
        metrics=dict(manifest.metrics),
        purpose=mapping(readable(objects.get(PURPOSE))),
        hparams=arguments(hparams),
        unstored=[str(name) for name in unstored] if isinstance(unstored, list) else [],
        optimizers=optimizer_settings(objects.get("state")),
        files=reader.sizes,
        assets={name: record.bytes for name, record in reader.assets.items()},
        groups={group: totals(records.values()) for group, records in manifest.tensors.items()},
    )


def totals(records: Iterable[TensorRecord]) -> CheckpointTotals:
    """Return the totals of some tensors."""
    every = list(records)
    dtypes: dict[str, int] = {}
    for record in every:
        dtypes[record.dtype] = dtypes.get(record.dtype, 0) + math.prod(record.shape)
    size = sum(elements * DTYPES[dtype].itemsize for dtype, elements in dtypes.items())
    return CheckpointTotals(len(every), sum(dtypes.values()), size, dict(sorted(dtypes.items())))


def arguments(stored: Mapping[str, Json]) -> dict[str, Json]:
    """Return stored arguments for people: a dataclass is an object of its fields and its name as "class"."""
    values = {name: readable(value) for name, value in mapping(stored.get("values")).items()}
    for name, value in mapping(stored.get("dataclasses")).items():
        inner = mapping(value)
        values[name] = {"class": str(inner.get("class")), **arguments(inner)}
    return values


def optimizer_settings(state: Json) -> dict[str, OptimizerSettings]:
    """Return the optimizers' settings in the object "state" of a run; empty if it has another structure."""
    found: dict[str, OptimizerSettings] = {}
    for name, stored in mapping(mapping(state).get("optimizers")).items():
        meta = mapping(stored)
        groups = meta.get("groups")
        listed = [mapping(group) for group in groups] if isinstance(groups, list) else []
        found[name] = OptimizerSettings(str(meta.get("optimizer")), [_settings(group) for group in listed])
    return found


def _settings(group: Mapping[str, Json]) -> dict[str, Json]:
    settings = {key: readable(value) for key, value in group.items() if key != "parameters"}
    parameters = group.get("parameters")
    return {**settings, "parameters": len(parameters) if isinstance(parameters, list) else 0}


def mapping(value: Json) -> dict[str, Json]:
    """Return the value if it is an object, else an empty one: values for display may have any structure."""
    return value if isinstance(value, dict) else {}


def readable(value: Json) -> Json:
    """Convert the result of `checkpoint.pack` into plain JSON for people.

    Tuples become lists, keys become texts, tagged numbers become numbers, and tensors and bytes become texts
    in angle brackets. Unlike `unpack`, this loses information, and needs no tensors.
    """
    if isinstance(value, list):
        return [readable(each) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: readable(each) for key, each in value.items()}
    content = value[tag]
    if tag == "$tuple":
        return readable(content)
    if tag in ("$tensor", "$array", "$scalar"):
        return f"<tensor {content}>"
    try:
        plain = unpack(value, {})
    except CheckpointError:  # from a later format, or with a tensor inside
        return _pairs(content)
    if isinstance(plain, bytes):
        return f"<{len(plain)} bytes>"
    return plain if isinstance(plain, (int, float)) else _pairs(content)


def _pairs(content: Json) -> Json:
    """Convert the pairs of a mapping whose keys are not plain texts."""
    if not isinstance(content, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in content
    ):
        return readable(content)
    return {str(readable(pair[0])): readable(pair[1]) for pair in content if isinstance(pair, list)}
