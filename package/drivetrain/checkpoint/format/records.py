"""The manifest's records of files and tensors: where each piece of a tensor is stored.

A tensor is cut into a grid of pieces, and each piece is in the file of one process. Most tensors of a large
model share a few layouts. A layout is described by its rule, whose size does not depend on the number of
processes:

    {"layouts": [{"dtype": "F32", "shape": [8192, 8192], "grid": [[[4096, 1]], []]}],
     "tensors": {"model": {"layers.0.weight": [0, 0], "layers.1.weight": [0, 0]}}}

An entry of `tensors` has the number of the layout and the number of the first process. In `grid`, each
dimension lists its cuts as ``[parts, step]``: the dimension is divided into that many parts, as by
`torch.chunk`, and the process number increases by the step from part to part. Each further cut divides every
part of the cut before.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from drivetrain.checkpoint.format.strict_json import as_object, as_record, as_text
from drivetrain.checkpoint.format.tensors import DTYPES, Hashes, read_sizes
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.types import Json

TENSORS = ".safetensors"
"""The suffix of tensor files."""

HASHES = ".hashes.json"
"""The suffix of files with the hashes of a tensor file's pieces."""

MAX_PROCESSES = 1 << 16
"""The largest number of processes that write a checkpoint."""

MAX_PIECES = 1 << 22
"""The largest total number of pieces in a checkpoint's layouts, which bounds the time to read it."""

_HASH = re.compile("[0-9a-f]{32}")

Content: TypeAlias = bytes
"""An alias: inside `FileRecord`, `bytes` is a size."""

Cut: TypeAlias = tuple[int, int]
"""The number of parts of a dimension, and the step of the process number from part to part."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        bytes: The size.
        xxh3_128: A hash in hexadecimal. For a JSON file, of its bytes; for a tensor file, of the file with
            its hashes, or "" if `hashes` are in the manifest.
        hashes: The hashes of a tensor file's header and pieces, if they are in the manifest.
        content: The whole content of a small file that the manifest holds, so that there is no such file.
    """

    bytes: int
    xxh3_128: str = ""
    hashes: Hashes | None = None
    content: Content | None = None


class Piece(NamedTuple):
    """A box of a tensor.

    Attributes:
        number: The process that wrote it.
        offset: The start of the box in the whole tensor, by dimension.
        shape: The size of the box, by dimension.
    """

    number: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of a tensor among the processes.

    Attributes:
        dtype: The safetensors format's name of the dtype; see `format.tensors.DTYPES`.
        shape: The whole tensor's shape.
        grid: The cuts of each dimension.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: tuple[tuple[Cut, ...], ...]

    @classmethod
    def whole(cls, dtype: str, shape: tuple[int, ...]) -> Layout:
        return cls(dtype, shape, ((),) * len(shape))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """The largest possible number of pieces; an uneven division leaves some processes without one."""
        return math.prod(
            min(size, math.prod(parts for parts, _ in cuts)) if cuts else 1
            for size, cuts in zip(self.shape, self.grid, strict=True)
        )

    @property
    def last(self) -> int:
        """The highest process number, relative to the first."""
        return sum((parts - 1) * step for cuts in self.grid for parts, step in cuts)

    def to_json(self) -> Json:
        grid: list[Json] = [[list(cut) for cut in cuts] for cuts in self.grid]
        return {"dtype": self.dtype, "shape": list(self.shape), "grid": grid}


class Cells:
    """The individual pieces of a layout.

    Attributes:
        starts: The offsets of the pieces, by dimension.
        numbers: The process of each piece, relative to the first; the last dimension varies fastest.

    Raises:
        DamagedCheckpointError: Two pieces belong to one process: a file can have only one under each name.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        parts = [_parts(0, size, cuts) for size, cuts in zip(layout.shape, layout.grid, strict=True)]
        self.starts = [[start for start, _ in each] for each in parts]
        steps = ([step for _, step in each] for each in parts)
        self.numbers = list(map(sum, itertools.product(*steps)))
        self._stops = [[*starts[1:], size] for starts, size in zip(self.starts, layout.shape, strict=True)]

    @cached_property
    def _indices(self) -> dict[int, int]:
        indices = {number: flat for flat, number in enumerate(self.numbers)}
        if len(indices) != len(self.numbers):
            raise DamagedCheckpointError(
                f"two pieces of a tensor of shape {list(self.layout.shape)} are in one file. A file can"
                " have only one piece under each name"
            )
        return indices

    def of(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return offset and shape of a process's piece, or None. The first process has number 0."""
        flat = self._indices.get(number)
        if flat is None:
            return None
        at = []
        for starts in reversed(self.starts):
            flat, index = divmod(flat, len(starts))
            at.append(index)
        return self._box(at[::-1])

    def _box(self, at: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offset = tuple(starts[each] for starts, each in zip(self.starts, at, strict=True))
        stops = (stops[each] for stops, each in zip(self._stops, at, strict=True))
        return offset, tuple(stop - start for start, stop in zip(offset, stops, strict=True))

    def within(
        self, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield number, offset and shape of each piece that overlaps a box of the tensor."""
        ranges = []
        for starts, first, length in zip(self.starts, offset, shape, strict=True):
            low = bisect_right(starts, first) - 1
            ranges.append(range(low, max(low + 1, bisect_right(starts, first + length - 1))))
        for at in itertools.product(*ranges):
            flat = 0
            for index, starts in zip(at, self.starts, strict=True):
                flat = flat * len(starts) + index
            yield self.numbers[flat], *self._box(list(at))


@lru_cache(maxsize=16)
def cells(layout: Layout) -> Cells:
    """Return the pieces of a layout; cached, because many tensors share a layout."""
    return Cells(layout)


def _parts(start: int, size: int, cuts: tuple[Cut, ...]) -> list[tuple[int, int]]:
    """Return the offset of each part of a dimension, and its addend to the process number."""
    if not cuts:
        return [(start, 0)]
    (parts, step), rest = cuts[0], cuts[1:]
    chunk = -(-size // parts)
    if not rest and chunk:
        return [(start + at, index * step) for index, at in enumerate(range(0, size, chunk))]
    found = []
    for index in range(-(-size // chunk) if chunk else 0):  # an uneven division has fewer parts
        at = index * chunk
        for inner, number in _parts(start + at, min(chunk, size - at), rest):
            found.append((inner, number + index * step))
    return found


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint.

    Attributes:
        layout: Its division.
        first: The number of the process that wrote the first piece.
    """

    layout: Layout
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def text(self) -> str:
        """The dtype and the shape, such as "F32[2, 3]"."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces; the last dimension varies fastest."""
        return tuple(self.within((0,) * len(self.shape), self.shape))

    @property
    def count(self) -> int:
        return len(cells(self.layout).numbers)

    def piece(self, number: int) -> Piece | None:
        """Return the piece that a process wrote, or None."""
        found = cells(self.layout).of(number - self.first)
        return None if found is None else Piece(number, *found)

    def writers(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> set[int]:
        """Return the processes whose pieces overlap a box of the tensor."""
        if shape == self.shape:
            return {self.first + number for number in cells(self.layout).numbers}
        return {piece.number for piece in self.within(offset, shape)}

    def within(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Piece]:
        """Yield the pieces that overlap a box of the tensor."""
        for number, start, size in cells(self.layout).within(offset, shape):
            yield Piece(self.first + number, start, size)


def file_name(group: str, number: int, processes: int) -> str:
    """Return the name of a process's file for a group of tensors.

    The name has the number of processes, so that a look at a directory shows whether files are missing.
    """
    return f"{group}{TENSORS}" if processes == 1 else f"{group}-{number + 1:05d}-of-{processes:05d}{TENSORS}"


def hashes_name(file: str) -> str:
    """Return the name of the file with a tensor file's hashes."""
    return file.removesuffix(TENSORS) + HASHES


def dump_file(name: str, record: FileRecord) -> Json:
    """Return a file's record as JSON; the key names what is hashed."""
    told: dict[str, Json] = {"bytes": record.bytes}
    if record.content is not None:
        content = base64.b64encode(record.content) if name.endswith(TENSORS) else record.content
        told["content"] = content.decode("ascii")
    if record.hashes is not None:
        return {**told, **dump_hashes(record.hashes)}
    return {**told, _hash_key(name): record.xxh3_128}


def _content(name: str, text: Json, what: str) -> bytes:
    try:
        content = as_text(text, what).encode("ascii")
        return base64.b64decode(content, validate=True) if name.endswith(TENSORS) else content
    except ValueError as error:
        raise DamagedCheckpointError(f"{what} is not what a manifest holds: {error}") from error


def load_file(name: str, value: Json, what: str) -> FileRecord:
    fields = dict(as_object(value, what))
    size = read_sizes([fields.pop("bytes", None)], f"{what}: bytes")[0]
    content = _content(name, fields.pop("content"), f"{what}: content") if "content" in fields else None
    if name.endswith(TENSORS) and _hash_key(name) not in fields:
        return FileRecord(size, hashes=load_hashes(fields, what), content=content)
    digest = as_record(fields, {_hash_key(name): str}, what)[_hash_key(name)]
    return FileRecord(size, _hash(digest, what), content=content)


def _hash_key(file: str) -> str:
    return "hashes_xxh3_128" if file.endswith(TENSORS) else "xxh3_128"


def dump_hashes(hashes: Hashes) -> dict[str, Json]:
    """Return the hashes of a tensor file as JSON."""
    return {"header_xxh3_128": hashes.header, "tensors_xxh3_128": dict(hashes.tensors)}


def load_hashes(value: Json, what: str) -> Hashes:
    fields = as_record(value, {"header_xxh3_128": str, "tensors_xxh3_128": dict}, what)
    tensors = {name: _hash(each, what) for name, each in fields["tensors_xxh3_128"].items()}
    return Hashes(_hash(fields["header_xxh3_128"], what), tensors)


def _hash(value: Json, what: str) -> str:
    digest = as_text(value, what)
    if not _HASH.fullmatch(digest):
        raise DamagedCheckpointError(f"{what}: {digest[:40]!r} is not an XXH3-128 hash")
    return digest


def dump_tensors(groups: Mapping[str, Mapping[str, TensorRecord]]) -> tuple[list[Json], dict[str, Json]]:
    """Return a checkpoint's layouts and tensors as JSON."""
    numbers: dict[Layout, int] = {}
    tensors: dict[str, Json] = {
        group: {
            name: [numbers.setdefault(record.layout, len(numbers)), record.first]
            for name, record in records.items()
        }
        for group, records in groups.items()
    }
    return [layout.to_json() for layout in numbers], tensors


def load_tensors(
    layouts: list[Json], tensors: dict[str, Json], processes: int, what: str
) -> dict[str, dict[str, TensorRecord]]:
    """Parse the result of `dump_tensors`."""
    known = [_layout(each, processes, f"{what}: layout {number}") for number, each in enumerate(layouts)]
    if sum(each.count for each in known) > MAX_PIECES:
        raise DamagedCheckpointError(f"{what}: the layouts have more than {MAX_PIECES} pieces together")
    lasts = [each.last for each in known]
    return {
        group: {
            name: _record(value, known, lasts, processes, f"{what}: tensors: {group!r}: {name!r}")
            for name, value in as_object(records, f"{what}: tensors: {group!r}").items()
        }
        for group, records in tensors.items()
    }


def _record(value: Json, known: list[Layout], lasts: list[int], processes: int, what: str) -> TensorRecord:
    layout, first = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if type(layout) is not int or type(first) is not int:
        raise DamagedCheckpointError(f"{what} is not a pair of a layout's and a process's number")
    if not 0 <= layout < len(known):
        raise DamagedCheckpointError(f"{what} has the layout {str(layout)[:40]}; there are {len(known)}")
    if first < 0 or first + lasts[layout] >= processes:
        raise DamagedCheckpointError(
            f"{what} has pieces from process {str(first)[:40]} on; it was saved by {processes}"
        )
    return TensorRecord(known[layout], first)


def _layout(value: Json, processes: int, what: str) -> Layout:
    fields = as_record(value, {"dtype": str, "shape": list, "grid": list}, what)
    dtype, shape = fields["dtype"], read_sizes(fields["shape"], f"{what}: shape")
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{what}: the dtype {dtype[:40]!r} is unknown")
    if len(fields["grid"]) != len(shape):
        raise DamagedCheckpointError(f"{what}: the cuts are not one list per dimension")
    grid = tuple(_grid(each, f"{what}: grid") for each in fields["grid"])
    if math.prod(parts for cuts in grid for parts, _ in cuts) > processes:
        raise DamagedCheckpointError(f"{what} has more pieces than the {processes} processes that saved it")
    return Layout(dtype, shape, grid)


def _grid(value: Json, what: str) -> tuple[Cut, ...]:
    if not isinstance(value, list) or len(value) > _MAX_CUTS:
        raise DamagedCheckpointError(f"{what} is not a list of at most {_MAX_CUTS} cuts per dimension")
    cuts = []
    for each in value:
        parts, step = (*read_numbers(each, what), 0, 0)[:2]
        if not isinstance(each, list) or len(each) != 2 or not parts or not step:
            raise DamagedCheckpointError(f"{what} has {str(each)[:40]}, not [parts, step] of at least 1")
        cuts.append((parts, step))
    return tuple(cuts)


_MAX_CUTS = 16
"""The most cuts of one dimension; a mesh of processes has one cut per mesh dimension."""


def read_numbers(value: Json, what: str) -> tuple[int, ...]:
    """Parse a list of process numbers, or counts of processes."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise DamagedCheckpointError(f"{what} is not a list of whole numbers")
    numbers = tuple(each for each in value if isinstance(each, int))
    if numbers and not (min(numbers) >= 0 and max(numbers) <= MAX_PROCESSES):
        raise DamagedCheckpointError(f"{what} has a number that is not from 0 to {MAX_PROCESSES}")
    return numbers
