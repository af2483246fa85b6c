"""The content of a checkpoint: the snapshot in memory and the manifest on disk.

checkpoint/
  model.safetensors       one file for each group of tensors, and for each process that writes part of it
  optimizer.safetensors
  assets/                 files stored beside the weights, if there are any
  manifest.json           the commit record: sizes, hashes, the span of each tensor, and the content of small
                          files: state.json, state.safetensors, hparams.json, checkpoint.json, assets.json

Several processes write model-00001-of-00004.safetensors and so on. The hashes of each file's tensors are in
model-00001-of-00004.hashes.json, so that the manifest, which every process reads, stays small.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drivetrain.checkpoint.format.asset_files import DEVICE
from drivetrain.checkpoint.format.records import (
    TENSORS,
    FileRecord,
    TensorRecord,
    dump_file,
    dump_tensors,
    file_name,
    load_file,
    load_tensors,
    read_numbers,
)
from drivetrain.checkpoint.format.strict_json import as_object, as_record, as_text, seal, unseal
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json
from drivetrain.core.version import __version__

FORMAT_VERSION = 1
"""The version that this drivetrain writes, and the newest that it reads."""

MANIFEST = "manifest.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PART_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]*")

_NUMBERED = re.compile(r"(.+)-(\d{5,7})-of-\d{5,7}" + re.escape(TENSORS))

_FIELDS = {"saved_by": dict, "progress": dict, "metrics": dict, "processes": int, "files": dict}
_FIELDS |= {"layouts": list, "tensors": dict}
"""The fields of a manifest, without its version."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The division of the writing among the processes; see `saving.sharding`.

    Attributes:
        records: Group to name to the tensor's record; only the first process has all of them.
        parts: Group to name to the part that this process writes: plain tensors, on any device.
        processes: The number of processes that write.
    """

    records: dict[str, dict[str, TensorRecord]]
    parts: dict[str, dict[str, Tensor]]
    processes: int = 1


@dataclass(slots=True)
class Snapshot:
    """The content of a checkpoint, in memory.

    Attributes:
        tensors: The tensors of each group ("model", "optimizer", "state") by name, on any device. Parameters
            have their plain names.
        objects: Strict JSON by name ("state", "hparams"), such as the result of `checkpoint.pack`.
        progress: The counts of `Progress.to_json`.
        metrics: The latest logged metrics; NaN and infinity are allowed.
        task: The name of the task's class, for people; it is never imported.
        plan: Which process writes which part, once that is decided; see `saving.sharding`.
        assets: Files stored beside the weights: the content of each by its path in the folder `assets`, with
            "/" between the parts. Only the first process needs them. Loading reads none; see `copy_assets`.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    progress: dict[str, Json] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    task: str = ""
    plan: SavePlan | None = None
    assets: dict[str, bytes] = field(default_factory=dict)


def _saved_by() -> dict[str, str]:
    return {"drivetrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit record of a checkpoint, `manifest.json`.

    Attributes:
        files: The checkpoint's other files, except those with the hashes of pieces.
        tensors: The record of each tensor, by group and name.
        progress: As in the snapshot.
        metrics: As in the snapshot.
        saved_by: Versions and the task's name, as text.
        processes: The number of processes that wrote the checkpoint.
        format_version: The version that the file was written in.
    """

    files: dict[str, FileRecord]
    tensors: dict[str, dict[str, TensorRecord]]
    progress: dict[str, Json]
    metrics: dict[str, float]
    saved_by: dict[str, str] = field(default_factory=_saved_by)
    processes: int = 1
    format_version: int = FORMAT_VERSION

    def objects(self) -> dict[str, str]:
        """Return the objects' names with their files."""
        return {file.removesuffix(".json"): file for file in self.files if file.endswith(".json")}

    def to_json(self) -> dict[str, Json]:
        """Return the manifest as strict JSON."""
        layouts, tensors = dump_tensors(self.tensors)
        return {
            "format_version": FORMAT_VERSION,
            "saved_by": dict(self.saved_by),
            "progress": self.progress,
            "metrics": dump_metrics(self.metrics),
            "processes": self.processes,
            "files": {name: dump_file(name, record) for name, record in self.files.items()},
            "layouts": layouts,
            "tensors": tensors,
        }

    @classmethod
    def from_json(cls, value: Json, what: str = "the manifest") -> Manifest:
        """Parse the result of `to_json`, and check all of it.

        Args:
            value: Parsed JSON.
            what: The name for messages.

        Raises:
            CheckpointError: The manifest was written by a newer drivetrain.
            DamagedCheckpointError: A key is missing or unknown, a type is wrong, a name leads out of the
                directory, or the cuts of a tensor are impossible.
        """
        given = dict(as_object(value, what))
        version = check_version(given.pop("format_version", None), what)
        fields = as_record(given, _FIELDS, what)
        files = {
            check_file_name(name, what): load_file(name, record, f"{what}: files: {name!r}")
            for name, record in fields["files"].items()
        }
        processes = read_numbers([fields["processes"]], f"{what}: processes")[0]
        if not processes:
            raise DamagedCheckpointError(f"{what}: processes is 0")
        tensors = load_tensors(fields["layouts"], fields["tensors"], processes, what)
        for group in tensors:
            check_part_name(group, f"{what}: tensors", DamagedCheckpointError)
        own = [group for group in tensors if f"{group}.json" in files]
        for name, record in files.items():
            if not name.endswith(TENSORS):
                continue
            if not _is_of(name, tensors, processes):
                raise DamagedCheckpointError(f"{what} lists {name!r}, which is not a file of its groups")
            if record.content is not None and not _is_of(name, own, processes):
                raise DamagedCheckpointError(f"{what} holds {name!r}, whose tensors belong to no object")
        return cls(
            files=files,
            tensors=tensors,
            progress=fields["progress"],
            metrics=load_metrics(fields["metrics"], f"{what}: metrics"),
            saved_by={name: as_text(text, f"{what}: saved_by") for name, text in fields["saved_by"].items()},
            processes=processes,
            format_version=version,
        )

    def dump(self) -> bytes:
        """Return the bytes of `manifest.json`: the JSON, sealed with its hash."""
        return seal(self.to_json(), MANIFEST)

    @classmethod
    def parse(cls, data: bytes | bytearray, what: str = "the manifest") -> Manifest:
        """Parse the bytes of `manifest.json`; raises as `from_json`."""
        return cls.from_json(unseal(data, what), what)


def _is_of(name: str, groups: Iterable[str], processes: int) -> bool:
    """Return whether one of the processes writes a file of this name."""
    group, number = name.removesuffix(TENSORS), 0
    numbered = _NUMBERED.fullmatch(name)
    if processes > 1 and numbered is not None:
        group, number = numbered[1], int(numbered[2]) - 1
    return group in groups and 0 <= number < processes and name == file_name(group, number, processes)


def check_version(version: Json, what: str) -> int:
    """Check a file's format version, and return it.

    Raises:
        CheckpointError: The version is newer than this drivetrain.
        DamagedCheckpointError: The value is not a version.
    """
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DamagedCheckpointError(
            f"{what}: format_version is {str(version)[:40]!r}, not a whole number of at least 1"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{what} was saved by a newer drivetrain: format {version}; this one ({__version__}) reads "
            f"{FORMAT_VERSION}. Upgrade with: pip install --upgrade drivetrain"
        )
    return version


def check_file_name(name: str, what: str) -> str:
    """Check that a file name stays in the directory and is an ordinary name on every system."""
    ours = name.endswith((TENSORS, ".json")) and name != MANIFEST and len(name) < 256
    if not ours or not _FILE_NAME.fullmatch(name) or DEVICE.fullmatch(name):
        raise DamagedCheckpointError(f"{what} lists the file {name[:80]!r}, which no checkpoint contains")
    return name


def check_part_name(name: str, what: str, error: type[CheckpointError] = CheckpointError) -> str:
    """Check the name of a group or an object, which becomes a file name, also on disks that ignore case."""
    if not _PART_NAME.fullmatch(name) or name == "manifest" or DEVICE.fullmatch(name):
        raise error(
            f"{what}: {name[:80]!r} cannot be a file name everywhere; allowed are lower-case letters, "
            "digits, '_' and '-', and not 'manifest' or a device such as 'con'"
        )
    return name


def dump_metrics(metrics: Mapping[str, float]) -> dict[str, Json]:
    """Return metrics as strict JSON: NaN and infinity become the texts "nan", "inf" and "-inf"."""
    return {
        name: float(value) if math.isfinite(value) else str(float(value)) for name, value in metrics.items()
    }


def load_metrics(value: Json, what: str) -> dict[str, float]:
    metrics = {}
    for name, each in as_object(value, what).items():
        number = _NOT_FINITE.get(each) if isinstance(each, str) else each
        if not isinstance(number, float):
            raise DamagedCheckpointError(f"{what}: {name!r} is {str(each)[:40]!r}, which is not a number")
        metrics[name] = number
    return metrics
