"""The content of a checkpoint: the snapshot in memory and the manifest on disk.

checkpoint/
  model.safetensors       one file for each group of tensors, and each process that writes some of it
  optimizer.safetensors
  state.safetensors
  state.json              one file for each object
  hparams.json
  manifest.json           the commit record: written last; sizes, hashes, and where each tensor is

Several processes write model-00001-of-00004.safetensors and so on, and the hashes of the tensors in each into
a file beside it, model-00001-of-00004.hashes.json. So the manifest, which every process reads, stays small.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.migrations import steps_from
from drivetrain.checkpoint.records import (
    TENSORS,
    FileRecord,
    TensorRecord,
    as_object,
    as_text,
    check_keys,
    dump_file,
    dump_tensors,
    file_name,
    load_file,
    load_tensors,
    read_numbers,
)
from drivetrain.checkpoint.strict_json import seal, unseal
from drivetrain.errors import CheckpointError
from drivetrain.types import Json
from drivetrain.version import __version__

FORMAT_VERSION = 2
"""What this drivetrain writes, and the newest that it reads."""

MANIFEST = "manifest.json"

IMPORTED = "imported"
"""Says in the object "state" what other program it was made from; the state of a run has no such entry."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PART_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]*")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""What Windows takes for a device, whatever follows the first dot."""

_NUMBERED = re.compile(r"(.+)-(\d{5,7})-of-\d{5,7}" + re.escape(TENSORS))

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of the writing among the processes; see `checkpoint.sharding`.

    Attributes:
        records: Group to name to the place of the tensor; the first process has those of all.
        parts: Group to name to what this process writes: plain tensors, on any device.
        processes: How many write.
    """

    records: dict[str, dict[str, TensorRecord]]
    parts: dict[str, dict[str, Tensor]]
    processes: int = 1


@dataclass(slots=True)
class Snapshot:
    """Everything that a checkpoint holds, in memory.

    Attributes:
        tensors: Group ("model", "optimizer", "state") to name to tensor; plain parameter names, any device.
        objects: Name ("state", "hparams") to strict JSON, such as `checkpoint.tree.pack` gives.
        progress: The counts of `Progress.to_json`.
        metrics: The latest logged metrics; NaN and infinity are allowed.
        task: The name of the task's class, for people; nothing is ever imported by it.
        plan: Which process writes what, once that has been planned; see `checkpoint.sharding`.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    progress: dict[str, Json] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    task: str = ""
    plan: Plan | None = None


def _saved_by() -> dict[str, str]:
    return {"drivetrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit record of a checkpoint, `manifest.json`.

    Attributes:
        files: The files beside the manifest, except those with the hashes of pieces.
        tensors: Group to name to where the tensor is.
        progress: As in the snapshot.
        metrics: As in the snapshot.
        saved_by: Versions and the task's name, as mere text.
        processes: How many processes wrote it.
        format_version: The version in which it was written; its fields are those of the newest version.
    """

    files: dict[str, FileRecord]
    tensors: dict[str, dict[str, TensorRecord]]
    progress: dict[str, Json]
    metrics: dict[str, float]
    saved_by: dict[str, str] = field(default_factory=_saved_by)
    processes: int = 1
    format_version: int = FORMAT_VERSION

    def objects(self) -> dict[str, str]:
        """The objects' names and the files that hold them."""
        return {file.removesuffix(".json"): file for file in self.files if file.endswith(".json")}

    def to_json(self) -> dict[str, Json]:
        """The manifest as strict JSON."""
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
        """Read what `to_json` gave, believing nothing.

        Args:
            value: Parsed JSON.
            what: What to call it in messages.

        Raises:
            CheckpointError: Written by a newer drivetrain.
            DamagedCheckpointError: A key missing or unknown, a wrong type, a name that leads out of the
                directory, a tensor that is cut as none can be.
        """
        fields = dict(as_object(value, what))
        version = check_version(fields.pop("format_version", None), what)
        for step in steps_from(version, FORMAT_VERSION, what):
            fields = step.manifest(fields)
        check_keys(
            fields, {"saved_by", "progress", "metrics", "processes", "files", "layouts", "tensors"}, what
        )
        saved_by = as_object(fields["saved_by"], f"{what}: saved_by")
        files = {
            check_file_name(name, what): load_file(name, record, f"{what}: files: {name!r}")
            for name, record in as_object(fields["files"], f"{what}: files").items()
        }
        processes = read_numbers([fields["processes"]], f"{what}: processes")[0]
        if not processes:
            raise DamagedCheckpointError(f"{what}: processes is 0")
        tensors = load_tensors(fields["layouts"], fields["tensors"], processes, what)
        for group in tensors:
            check_part_name(group, f"{what}: tensors", DamagedCheckpointError)
        for name in files:
            if name.endswith(TENSORS) and not _is_of(name, tensors, processes):
                raise DamagedCheckpointError(f"{what} lists {name!r}, which is no file of its groups")
        return cls(
            files=files,
            tensors=tensors,
            progress=as_object(fields["progress"], f"{what}: progress"),
            metrics=load_metrics(fields["metrics"], f"{what}: metrics"),
            saved_by={name: as_text(text, f"{what}: saved_by") for name, text in saved_by.items()},
            processes=processes,
            format_version=version,
        )

    def dump(self) -> bytes:
        """The bytes of `manifest.json`: the JSON, sealed with a hash of itself."""
        return seal(self.to_json(), MANIFEST)

    @classmethod
    def parse(cls, data: bytes | bytearray, what: str = "the manifest") -> Manifest:
        """Read the bytes of `manifest.json`; errors as in `from_json`."""
        return cls.from_json(unseal(data, what), what)


def _is_of(name: str, groups: Iterable[str], processes: int) -> bool:
    """Whether one of the processes writes a file of this name."""
    group, number = name.removesuffix(TENSORS), 0
    numbered = _NUMBERED.fullmatch(name)
    if processes > 1 and numbered is not None:
        group, number = numbered[1], int(numbered[2]) - 1
    return group in groups and 0 <= number < processes and name == file_name(group, number, processes)


def check_version(version: Json, what: str) -> int:
    """The format version that a file of ours tells.

    Raises:
        CheckpointError: It is newer than this drivetrain.
        DamagedCheckpointError: It is no version at all.
    """
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DamagedCheckpointError(
            f"{what}: format_version is {str(version)[:40]!r}, not a number from 1 on"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{what} was saved by a newer drivetrain: format {version}; this one ({__version__}) reads "
            f"{FORMAT_VERSION}. Upgrade with: pip install --upgrade drivetrain"
        )
    return version


def check_file_name(name: str, what: str) -> str:
    """Refuse names that could lead out of the directory, or mean something special somewhere.

    Raises:
        DamagedCheckpointError: Not a plain name of letters, digits, ".", "_" and "-" that ends as one of our
            files does; or a device of Windows.
    """
    ours = name.endswith((TENSORS, ".json")) and name != MANIFEST and len(name) < 256
    if not ours or not _FILE_NAME.fullmatch(name) or _DEVICE.fullmatch(name):
        raise DamagedCheckpointError(f"{what} lists the file {name[:80]!r}, which no checkpoint contains")
    return name


def check_part_name(name: str, what: str, error: type[CheckpointError] = CheckpointError) -> str:
    """Check the name of a group or an object; it becomes a file name, also where case makes no difference.

    Raises:
        CheckpointError: Other than lower-case letters, digits, "_" and "-", or "manifest", or a device of
            Windows.
    """
    if not _PART_NAME.fullmatch(name) or name == "manifest" or _DEVICE.fullmatch(name):
        raise error(
            f"{what}: {name[:80]!r} cannot be a file name everywhere; allowed are lower-case letters, "
            "digits, '_' and '-', and not 'manifest' or a device such as 'con'"
        )
    return name


def dump_metrics(metrics: Mapping[str, float]) -> dict[str, Json]:
    """Metrics as strict JSON: NaN and infinity become the texts "nan", "inf" and "-inf"."""
    return {
        name: float(value) if math.isfinite(value) else str(float(value)) for name, value in metrics.items()
    }


def load_metrics(value: Json, what: str) -> dict[str, float]:
    """Read what `dump_metrics` gave.

    Raises:
        DamagedCheckpointError: Not an object of numbers and those three texts.
    """
    metrics = {}
    for name, each in as_object(value, what).items():
        if isinstance(each, str) and each in _NOT_FINITE:
            metrics[name] = _NOT_FINITE[each]
        elif isinstance(each, float):
            metrics[name] = each
        else:
            raise DamagedCheckpointError(f"{what}: {name!r} is {str(each)[:40]!r}, which is no number")
    return metrics
