"""What a checkpoint consists of: the snapshot in memory and the manifest on disk.

checkpoint/
  model.safetensors       one file for each group of tensors
  optimizer.safetensors
  state.safetensors
  state.json              one file for each object
  hparams.json
  manifest.json           the commit record: written last; sizes, hashes, and where each tensor lies
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.strict_json import seal, unseal
from drivetrain.checkpoint.tensors import DTYPES, read_sizes
from drivetrain.errors import CheckpointError
from drivetrain.types import Json
from drivetrain.version import __version__

FORMAT_VERSION = 1
"""What this drivetrain writes, and the newest that it reads."""

MANIFEST = "manifest.json"

TENSORS = ".safetensors"
"""How the names of files of tensors end."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PART_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]*")
_HASH = re.compile(r"[0-9a-f]{32}")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Part:
    """What one process writes of a tensor.

    Attributes:
        tensor: The part itself, a plain tensor on any device.
        offset: Where it begins in the whole tensor, by dimension.
        shape: The whole tensor's.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class Snapshot:
    """Everything that a checkpoint holds, in memory.

    Attributes:
        tensors: Group ("model", "optimizer", "state") to name to tensor; plain parameter names, any device.
        objects: Name ("state", "hparams") to strict JSON, such as `checkpoint.tree.pack` gives.
        progress: The counts of `Progress.to_json`.
        metrics: The latest logged metrics; NaN and infinity are allowed.
        task: The name of the task's class, for people; nothing is ever imported by it.
        parts: What this process writes of `tensors`, once that has been planned; see `checkpoint.sharding`.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    progress: dict[str, Json] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    task: str = ""
    parts: dict[str, dict[str, Part]] | None = None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        bytes: Its size.
        xxh3_128: The hash of its bytes, in hexadecimal; of a file of tensors that of its header (and the
            length before it), since each piece has its own.
    """

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and the file where it lies, under the tensor's name.

    Attributes:
        file: The file's name.
        offset: Where the box begins in the whole tensor, by dimension.
        shape: The box's size, by dimension.
        xxh3_128: The hash of its bytes, so that a part can be read, and compared, without the rest of a file.
    """

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint, whole, whatever number of pieces it is stored in.

    Attributes:
        shape: The whole tensor's.
        dtype: The safetensors format's name of it; see `checkpoint.tensors.DTYPES`.
        pieces: Where its parts lie.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


def _saved_by() -> dict[str, str]:
    return {"drivetrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit record of a checkpoint, `manifest.json`.

    Attributes:
        files: Each file beside the manifest.
        tensors: Group to name to where the tensor lies.
        progress: As in the snapshot.
        metrics: As in the snapshot.
        saved_by: Versions and the task's name, as mere text.
        format_version: Of the layout.
    """

    files: dict[str, FileRecord]
    tensors: dict[str, dict[str, TensorRecord]]
    progress: dict[str, Json]
    metrics: dict[str, float]
    saved_by: dict[str, str] = field(default_factory=_saved_by)
    format_version: int = FORMAT_VERSION

    def objects(self) -> dict[str, str]:
        """The objects' names and the files that hold them."""
        return {file.removesuffix(".json"): file for file in self.files if file.endswith(".json")}

    def to_json(self) -> dict[str, Json]:
        """The manifest as strict JSON."""
        return {
            "format_version": self.format_version,
            "saved_by": dict(self.saved_by),
            "progress": self.progress,
            "metrics": dump_metrics(self.metrics),
            "files": {
                name: {"bytes": record.bytes, _hash_key(name): record.xxh3_128}
                for name, record in self.files.items()
            },
            "tensors": {
                group: {name: _dump_record(record) for name, record in records.items()}
                for group, records in self.tensors.items()
            },
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
                directory, a tensor outside its bounds or in a file that is not listed.
        """
        fields = _object(value, what)
        version = check_version(fields, what)
        _keys(fields, {"format_version", "saved_by", "progress", "metrics", "files", "tensors"}, what)
        saved_by = _object(fields["saved_by"], f"{what}: saved_by")
        files = {
            check_file_name(name, what): _load_file(name, record, f"{what}: files: {name!r}")
            for name, record in _object(fields["files"], f"{what}: files").items()
        }
        tensors = {}
        for group, records in _object(fields["tensors"], f"{what}: tensors").items():
            where = f"{what}: tensors: {group!r}"
            tensors[check_part_name(group, where, DamagedCheckpointError)] = {
                name: _load_record(record, files, f"{where}: {name!r}")
                for name, record in _object(records, where).items()
            }
        return cls(
            files=files,
            tensors=tensors,
            progress=_object(fields["progress"], f"{what}: progress"),
            metrics=load_metrics(fields["metrics"], f"{what}: metrics"),
            saved_by={name: _text(text, f"{what}: saved_by") for name, text in saved_by.items()},
            format_version=version,
        )

    def dump(self) -> bytes:
        """The bytes of `manifest.json`: the JSON, sealed with a hash of itself."""
        return seal(self.to_json(), MANIFEST)

    @classmethod
    def parse(cls, data: bytes | bytearray, what: str = "the manifest") -> Manifest:
        """Read the bytes of `manifest.json`; errors as in `from_json`."""
        return cls.from_json(unseal(data, what), what)


def check_version(fields: Mapping[str, Json], what: str) -> int:
    """The format version of a file of ours.

    Raises:
        CheckpointError: It is newer than this drivetrain.
        DamagedCheckpointError: It is no version at all.
    """
    version = fields.get("format_version")
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
        DamagedCheckpointError: Not a plain name of letters, digits, ".", "_" and "-".
    """
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise DamagedCheckpointError(f"{what} lists the file {name[:80]!r}, which no checkpoint contains")
    return name


def check_part_name(name: str, what: str, error: type[CheckpointError] = CheckpointError) -> str:
    """Check the name of a group or an object; it becomes a file name, also where case makes no difference.

    Raises:
        CheckpointError: Other than lower-case letters, digits, "_" and "-", or "manifest".
    """
    if not _PART_NAME.fullmatch(name) or name == "manifest":
        raise error(
            f"{what}: {name[:80]!r} cannot be a file name; allowed are lower-case letters, digits, '_' and "
            "'-', and not 'manifest'"
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
    for name, each in _object(value, what).items():
        if isinstance(each, str) and each in _NOT_FINITE:
            metrics[name] = _NOT_FINITE[each]
        elif isinstance(each, float):
            metrics[name] = each
        else:
            raise DamagedCheckpointError(f"{what}: {name!r} is {str(each)[:40]!r}, which is no number")
    return metrics


def _dump_record(record: TensorRecord) -> Json:
    pieces: list[Json] = [
        {
            "file": piece.file,
            "offset": list(piece.offset),
            "shape": list(piece.shape),
            "xxh3_128": piece.xxh3_128,
        }
        for piece in record.pieces
    ]
    return {"shape": list(record.shape), "dtype": record.dtype, "pieces": pieces}


def _hash_key(file: str) -> str:
    return "header_xxh3_128" if file.endswith(TENSORS) else "xxh3_128"


def _load_file(name: str, value: Json, what: str) -> FileRecord:
    fields = _object(value, what)
    key = _hash_key(name)
    _keys(fields, {"bytes", key}, what)
    return FileRecord(read_sizes([fields["bytes"]], f"{what}: bytes")[0], _hash(fields[key], what))


def _load_record(value: Json, files: Mapping[str, FileRecord], what: str) -> TensorRecord:
    fields = _object(value, what)
    _keys(fields, {"shape", "dtype", "pieces"}, what)
    shape = read_sizes(fields["shape"], f"{what}: shape")
    dtype = _text(fields["dtype"], what)
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{what}: the dtype {dtype[:40]!r} is unknown")
    listed = fields["pieces"]
    if not isinstance(listed, list) or not listed:
        raise DamagedCheckpointError(f"{what}: pieces is no list of at least one")
    pieces = tuple(_load_piece(piece, shape, files, what) for piece in listed)
    _check_tiling(pieces, shape, what)
    return TensorRecord(shape, dtype, pieces)


def _load_piece(value: Json, whole: tuple[int, ...], files: Mapping[str, FileRecord], what: str) -> Piece:
    fields = _object(value, f"{what}: a piece")
    _keys(fields, {"file", "offset", "shape", "xxh3_128"}, f"{what}: a piece")
    file = _text(fields["file"], f"{what}: a piece's file")
    if file not in files or not file.endswith(TENSORS):
        raise DamagedCheckpointError(
            f"{what}: a piece lies in {file[:80]!r}, which is not among the files of tensors"
        )
    offset = read_sizes(fields["offset"], f"{what}: a piece's offset")
    shape = read_sizes(fields["shape"], f"{what}: a piece's shape")
    inside = len(offset) == len(shape) == len(whole) and all(
        start + length <= size for start, length, size in zip(offset, shape, whole, strict=True)
    )
    if not inside:
        raise DamagedCheckpointError(
            f"{what}: a piece of shape {list(shape)} at {list(offset)} is not inside {list(whole)}"
        )
    return Piece(file, offset, shape, _hash(fields["xxh3_128"], f"{what}: a piece"))


def _check_tiling(pieces: tuple[Piece, ...], whole: tuple[int, ...], what: str) -> None:
    """Every element in exactly one piece. Sharding cuts straight through, so the pieces form a grid."""
    cells = {piece.offset: piece.shape for piece in pieces}
    grid = [sorted({offset[axis] for offset in cells}) for axis in range(len(whole))]
    ends = [
        {start: stop - start for start, stop in zip(starts, [*starts[1:], size], strict=True)}
        for starts, size in zip(grid, whole, strict=True)
    ]
    complete = (
        len(cells) == len(pieces) == math.prod(map(len, grid))
        and all(starts[0] == 0 for starts in grid)
        and all(
            length == ends[axis][offset[axis]]
            for offset, shape in cells.items()
            for axis, length in enumerate(shape)
        )
    )
    if not complete:
        raise DamagedCheckpointError(f"{what}: its {len(pieces)} pieces do not make up {list(whole)}")


def _hash(value: Json, what: str) -> str:
    digest = _text(value, what)
    if not _HASH.fullmatch(digest):
        raise DamagedCheckpointError(f"{what}: {digest[:40]!r} is no XXH3-128 hash")
    return digest


def _object(value: Json, what: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not an object")
    return value


def _keys(fields: Mapping[str, Json], expected: set[str], what: str) -> None:
    if set(fields) != expected:
        wrong = ", ".join(repr(name[:40]) for name in sorted(set(fields) ^ expected)[:8])
        raise DamagedCheckpointError(
            f"{what} must have exactly {', '.join(sorted(expected))}; at fault: {wrong}"
        )


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not a text")
    return value
