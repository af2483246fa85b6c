"""Where the tensors of a checkpoint lie, as a manifest tells it.

The parts of a sharded tensor form a grid: each dimension is cut at some places, straight through. So what is
told of a tensor is its cuts, and for each cell, the last dimension running fastest, the number of its file
and the hash of its bytes. That is small enough for thousands of processes, and nothing can overlap or be left
out:

    {"files": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
     "tensors": {"weight": {"dtype": "F32", "shape": [8, 3], "cuts": [[0, 5], [0]], "files": [0, 1],
                            "xxh3_128": ["...", "..."]}}}
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.tensors import DTYPES, read_sizes
from drivetrain.errors import CheckpointError
from drivetrain.types import Json

TENSORS = ".safetensors"
"""How the names of files of tensors end."""

_HEX = "0123456789abcdef"
_HASH_LENGTH = 32
_HASH = re.compile(f"[{_HEX}]{{{_HASH_LENGTH}}}")


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


class Piece(NamedTuple):
    """A box of a tensor and the file where it lies, under the tensor's name.

    A tuple, since a run of a thousand processes has a million of them, and a data class takes thrice as long.

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


def dump_file(name: str, record: FileRecord) -> Json:
    """A file's record as JSON; which hash it has is told by the key."""
    return {"bytes": record.bytes, _hash_key(name): record.xxh3_128}


def load_file(name: str, value: Json, what: str) -> FileRecord:
    """Read what `dump_file` gave.

    Raises:
        DamagedCheckpointError: It is not that.
    """
    fields = as_object(value, what)
    key = _hash_key(name)
    check_keys(fields, {"bytes", key}, what)
    return FileRecord(read_sizes([fields["bytes"]], f"{what}: bytes")[0], _hash(fields[key], what))


def _hash_key(file: str) -> str:
    return "header_xxh3_128" if file.endswith(TENSORS) else "xxh3_128"


def dump_records(records: Mapping[str, TensorRecord], what: str) -> Json:
    """A group's tensors as JSON.

    Raises:
        CheckpointError: The pieces of a tensor do not form a grid.
    """
    files = sorted({piece.file for record in records.values() for piece in record.pieces})
    numbers = {file: number for number, file in enumerate(files)}
    tensors: dict[str, Json] = {}
    for name, record in records.items():
        pieces = sorted(record.pieces, key=lambda piece: piece.offset)
        cuts = [sorted({piece.offset[axis] for piece in pieces}) for axis in range(len(record.shape))]
        whole = all(each[0] == 0 for each in cuts)
        if not whole or [(piece.offset, piece.shape) for piece in pieces] != _cells(cuts, record.shape):
            raise CheckpointError(f"{what}: the parts of {name!r} do not make up {list(record.shape)}")
        if len({piece.file for piece in pieces}) != len(pieces):
            raise CheckpointError(
                f"{what}: two parts of {name!r} are in one file, which has room for one name"
            )
        tensors[name] = {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "cuts": [list(each) for each in cuts],
            "files": [numbers[piece.file] for piece in pieces],
            "xxh3_128": [piece.xxh3_128 for piece in pieces],
        }
    return {"files": list(files), "tensors": tensors}


def load_records(value: Json, files: Mapping[str, FileRecord], what: str) -> dict[str, TensorRecord]:
    """Read what `dump_records` gave.

    Args:
        value: Parsed JSON.
        files: The checkpoint's files.
        what: What to call it in messages.

    Raises:
        DamagedCheckpointError: It is not that, or names a file that is not among the files of tensors.
    """
    fields = as_object(value, what)
    check_keys(fields, {"files", "tensors"}, what)
    listed = fields["files"]
    if not isinstance(listed, list):
        raise DamagedCheckpointError(f"{what}: files is no list")
    names = [as_text(each, f"{what}: files") for each in listed]
    for name in names:
        if name not in files or not name.endswith(TENSORS):
            raise DamagedCheckpointError(
                f"{what}: a piece lies in {name[:80]!r}, which is not among the files of tensors"
            )
    if len(set(names)) != len(names):
        raise DamagedCheckpointError(f"{what}: files lists a file twice")
    return {
        name: _load_record(record, names, f"{what}: {name!r}")
        for name, record in as_object(fields["tensors"], f"{what}: tensors").items()
    }


def _load_record(value: Json, names: list[str], what: str) -> TensorRecord:
    fields = as_object(value, what)
    check_keys(fields, {"shape", "dtype", "cuts", "files", "xxh3_128"}, what)
    shape = read_sizes(fields["shape"], f"{what}: shape")
    dtype = as_text(fields["dtype"], what)
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{what}: the dtype {dtype[:40]!r} is unknown")
    listed = fields["cuts"]
    if not isinstance(listed, list) or len(listed) != len(shape):
        raise DamagedCheckpointError(f"{what}: cuts are not one list for each dimension")
    cuts = [_cuts(each, size, f"{what}: cuts") for each, size in zip(listed, shape, strict=True)]
    count = math.prod(map(len, cuts))
    numbers, hashes = fields["files"], fields["xxh3_128"]
    if not isinstance(numbers, list) or not isinstance(hashes, list):
        raise DamagedCheckpointError(f"{what}: files or hashes are no list")
    if len(numbers) != count or len(hashes) != count:
        raise DamagedCheckpointError(
            f"{what}: {len(numbers)} files and {len(hashes)} hashes for {count} pieces of {list(shape)}"
        )
    cells = _cells(cuts, shape)
    offsets, extents = zip(*cells, strict=True)
    places = _places(numbers, names, what)
    pieces = tuple(map(Piece, places, offsets, extents, _hashes(hashes, what)))
    return TensorRecord(shape, dtype, pieces)


def _cells(cuts: list[list[int]], shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and size of each cell of a grid, the last dimension running fastest."""
    lengths = [
        [stop - start for start, stop in zip(starts, [*starts[1:], size], strict=True)]
        for starts, size in zip(cuts, shape, strict=True)
    ]
    return list(zip(itertools.product(*cuts), itertools.product(*lengths), strict=True))


def _cuts(value: Json, size: int, what: str) -> list[int]:
    """Where a dimension is cut: from 0 on, rising, and nowhere but inside."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise DamagedCheckpointError(f"{what} are no list of numbers")
    cuts = [each for each in value if isinstance(each, int)]
    rising = all(map(operator.lt, cuts, cuts[1:]))
    if not cuts or cuts[0] != 0 or not rising or (cuts[-1] >= size and cuts != [0]):
        raise DamagedCheckpointError(f"{what} {cuts[:8]} do not divide a dimension of {size}")
    return cuts


def _places(numbers: list[Json], names: list[str], what: str) -> list[str]:
    """The files of a tensor's pieces, by their numbers."""
    wrong = [each for each in numbers if type(each) is not int or not 0 <= each < len(names)]
    if wrong:
        raise DamagedCheckpointError(f"{what}: {str(wrong[0])[:40]!r} is not the number of a file")
    places = [names[each] for each in numbers if isinstance(each, int)]
    if len(set(places)) != len(numbers):
        raise DamagedCheckpointError(f"{what}: two pieces are in one file, where only one can have its name")
    return places


def _hashes(values: list[Json], what: str) -> list[str]:
    """The hashes of a tensor's pieces, checked all at once: one by one takes longer than reading the JSON."""
    texts = [each for each in values if isinstance(each, str)]
    right = len(texts) == len(values) and set(map(len, texts)) <= {_HASH_LENGTH}
    return texts if right and not "".join(texts).strip(_HEX) else [_hash(each, what) for each in values]


def _hash(value: Json, what: str) -> str:
    digest = as_text(value, what)
    if not _HASH.fullmatch(digest):
        raise DamagedCheckpointError(f"{what}: {digest[:40]!r} is no XXH3-128 hash")
    return digest


def as_object(value: Json, what: str) -> dict[str, Json]:
    """The value, if it is a JSON object.

    Raises:
        DamagedCheckpointError: It is something else.
    """
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not an object")
    return value


def check_keys(fields: Mapping[str, Json], expected: set[str], what: str) -> None:
    """See that an object has the keys that it must have, and no others.

    Raises:
        DamagedCheckpointError: It has not; says which are at fault.
    """
    if set(fields) != expected:
        wrong = ", ".join(repr(name[:40]) for name in sorted(set(fields) ^ expected)[:8])
        raise DamagedCheckpointError(
            f"{what} must have exactly {', '.join(sorted(expected))}; at fault: {wrong}"
        )


def as_text(value: Json, what: str) -> str:
    """The value, if it is a text.

    Raises:
        DamagedCheckpointError: It is something else.
    """
    if not isinstance(value, str):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not a text")
    return value
