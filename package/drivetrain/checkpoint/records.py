"""Where the tensors of a checkpoint are stored, as a manifest says it.

A tensor is cut into a grid of pieces, and each piece is in the file of one process. Most tensors of a large
model have one of a few layouts, and a layout is described by its rule, whatever the number of processes:

    {"layouts": [{"dtype": "F32", "shape": [8192, 8192], "grid": [[[4096, 1]], []]}],
     "tensors": {"model": {"layers.0.weight": [0, 0], "layers.1.weight": [0, 0]}}}

An entry of `tensors` has the number of the layout and the number of the first process. In `grid`, each
dimension lists its cuts as ``[parts, step]``: the dimension is divided into that many parts, as `torch.chunk`
does it, and the number of the process rises by the step from part to part. Each further cut divides every
part of the cut before. A grid that no such rule describes is spelled out: `cuts` has the places where each
dimension is cut, and `files` the process of each piece, the last dimension running fastest.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.tensors import DTYPES, Hashes, read_sizes
from drivetrain.types import Json

TENSORS = ".safetensors"
"""The ending of the names of files of tensors."""

HASHES = ".hashes.json"
"""The ending of the names of the files with the hashes of the pieces in a file of tensors."""

MAX_PROCESSES = 1 << 16
"""A checkpoint is written by at most this many processes."""

MAX_PIECES = 1 << 22
"""The layouts of a checkpoint have at most this many pieces together, which bounds the time to read one."""

_HASH = re.compile("[0-9a-f]{32}")

Cut: TypeAlias = tuple[int, int]
"""Parts that a dimension is divided into, and the step of the process's number from part to part."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        bytes: Its size.
        xxh3_128: A hash, in hexadecimal: of the bytes of a JSON file. Of a file of tensors, that of the file
            with its hashes; "" where `hashes` are in the manifest.
        hashes: The hashes of the header and the pieces of a file of tensors, where they are in the manifest.
    """

    bytes: int
    xxh3_128: str = ""
    hashes: Hashes | None = None


class Piece(NamedTuple):
    """A box of a tensor.

    Attributes:
        number: The process that wrote it.
        offset: Where the box begins in the whole tensor, by dimension.
        shape: The box's size, by dimension.
    """

    number: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is divided among the processes.

    Attributes:
        dtype: The safetensors format's name of the dtype; see `checkpoint.tensors.DTYPES`.
        shape: The whole tensor's.
        grid: The cuts of each dimension; empty where the grid is spelled out.
        cuts: Where each dimension is cut, from 0 on, of a grid that is spelled out.
        files: The process of each piece of a grid that is spelled out, the last dimension running fastest.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: tuple[tuple[Cut, ...], ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()
    files: tuple[int, ...] = ()

    @classmethod
    def whole(cls, dtype: str, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor in one piece."""
        return cls(dtype, shape, ((),) * len(shape))

    def __hash__(self) -> int:
        # Not the grid that is spelled out: this is asked for often, and must not take the longer for it.
        return hash((self.dtype, self.shape, self.grid, len(self.files)))

    @property
    def bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """The number of pieces, or what it is at most: an uneven division leaves some processes without."""
        if self.files:
            return len(self.files)
        return math.prod(
            min(size, math.prod(parts for parts, _ in cuts)) if cuts else 1
            for size, cuts in zip(self.shape, self.grid, strict=True)
        )

    @property
    def last(self) -> int:
        """The highest number of a process, counted from the first."""
        if self.files:
            return max(self.files)
        return sum((parts - 1) * step for cuts in self.grid for parts, step in cuts)

    def to_json(self) -> Json:
        """The layout as JSON."""
        told: dict[str, Json] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.files:
            return {**told, "cuts": [list(each) for each in self.cuts], "files": list(self.files)}
        return {**told, "grid": [[list(cut) for cut in cuts] for cuts in self.grid]}


class Cells:
    """The pieces of a layout, one by one.

    Args:
        layout: The layout.

    Attributes:
        starts: Where the pieces begin, by dimension.
        numbers: The process of each piece, counted from the first; the last dimension runs fastest.

    Raises:
        DamagedCheckpointError: Two pieces are one process's: its file has room for one of a name.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        if layout.files:
            self.starts = [list(each) for each in layout.cuts]
            self.numbers = list(layout.files)
        else:
            parts = [_parts(0, size, cuts) for size, cuts in zip(layout.shape, layout.grid, strict=True)]
            self.starts = [[start for start, _ in each] for each in parts]
            steps = ([step for _, step in each] for each in parts)
            self.numbers = list(map(sum, itertools.product(*steps)))
        self._stops = [[*starts[1:], size] for starts, size in zip(self.starts, layout.shape, strict=True)]

    @cached_property
    def _places(self) -> dict[int, int]:
        places = {number: place for place, number in enumerate(self.numbers)}
        if len(places) != len(self.numbers):
            raise DamagedCheckpointError(
                f"two pieces of a tensor of shape {list(self.layout.shape)} are in one file, which has room"
                " for one of a name"
            )
        return places

    def of(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Offset and shape of the piece of a process, counted from the first; None if it has none."""
        place = self._places.get(number)
        if place is None:
            return None
        at = []
        for starts in reversed(self.starts):
            place, index = divmod(place, len(starts))
            at.append(index)
        return self._box(at[::-1])

    def _box(self, at: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offset = tuple(starts[each] for starts, each in zip(self.starts, at, strict=True))
        stops = (stops[each] for stops, each in zip(self._stops, at, strict=True))
        return offset, tuple(stop - start for start, stop in zip(offset, stops, strict=True))

    def within(
        self, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Number, offset and shape of each piece that a box of the tensor needs."""
        ranges = []
        for starts, first, length in zip(self.starts, offset, shape, strict=True):
            low = bisect_right(starts, first) - 1
            ranges.append(range(low, max(low + 1, bisect_right(starts, first + length - 1))))
        for at in itertools.product(*ranges):
            place = 0
            for index, starts in zip(at, self.starts, strict=True):
                place = place * len(starts) + index
            yield self.numbers[place], *self._box(list(at))


@lru_cache(maxsize=16)
def cells(layout: Layout) -> Cells:
    """The pieces of a layout; those of the last layouts are kept, as many tensors have the same."""
    return Cells(layout)


def _parts(start: int, size: int, cuts: tuple[Cut, ...]) -> list[tuple[int, int]]:
    """Where the parts of a dimension begin, and what each adds to the number of the process."""
    if not cuts:
        return [(start, 0)]
    (parts, step), rest = cuts[0], cuts[1:]
    chunk = -(-size // parts)
    if not rest and chunk:
        return [(start + at, index * step) for index, at in enumerate(range(0, size, chunk))]
    found = []
    for index in range(-(-size // chunk) if chunk else 0):  # an uneven division leaves some without a part
        at = index * chunk
        for inner, number in _parts(start + at, min(chunk, size - at), rest):
            found.append((inner, number + index * step))
    return found


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint.

    Attributes:
        layout: How it is divided.
        first: The number of the process that wrote its first piece.
    """

    layout: Layout
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self.layout.shape

    @property
    def dtype(self) -> str:
        """The safetensors format's name of the dtype."""
        return self.layout.dtype

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, the last dimension running fastest."""
        return tuple(self.within((0,) * len(self.shape), self.shape))

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(cells(self.layout).numbers)

    def piece(self, number: int) -> Piece | None:
        """The piece that a process wrote, if it wrote one."""
        found = cells(self.layout).of(number - self.first)
        return None if found is None else Piece(number, *found)

    def writers(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> set[int]:
        """The processes with the pieces that a box of the tensor needs."""
        if shape == self.shape:
            return {self.first + number for number in cells(self.layout).numbers}
        return {piece.number for piece in self.within(offset, shape)}

    def within(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Piece]:
        """The pieces that a box of the tensor needs."""
        for number, start, size in cells(self.layout).within(offset, shape):
            yield Piece(self.first + number, start, size)


def file_name(group: str, number: int, processes: int) -> str:
    """The name of the file of a group of tensors that a process writes.

    The name says how many processes there are, so that whoever looks at a directory knows whether it is all.
    """
    return f"{group}{TENSORS}" if processes == 1 else f"{group}-{number + 1:05d}-of-{processes:05d}{TENSORS}"


def hashes_name(file: str) -> str:
    """The name of the file with the hashes of a file of tensors."""
    return file.removesuffix(TENSORS) + HASHES


def dump_file(name: str, record: FileRecord) -> Json:
    """A file's record as JSON; the key says what the hash is of."""
    if record.hashes is not None:
        return {"bytes": record.bytes, **dump_hashes(record.hashes)}
    return {"bytes": record.bytes, _hash_key(name): record.xxh3_128}


def load_file(name: str, value: Json, what: str) -> FileRecord:
    """Read what `dump_file` gave.

    Raises:
        DamagedCheckpointError: It is not that.
    """
    fields = dict(as_object(value, what))
    size = read_sizes([fields.pop("bytes", None)], f"{what}: bytes")[0]
    if name.endswith(TENSORS) and _hash_key(name) not in fields:
        return FileRecord(size, hashes=load_hashes(fields, what))
    check_keys(fields, {_hash_key(name)}, what)
    return FileRecord(size, _hash(fields[_hash_key(name)], what))


def _hash_key(file: str) -> str:
    return "hashes_xxh3_128" if file.endswith(TENSORS) else "xxh3_128"


def dump_hashes(hashes: Hashes) -> dict[str, Json]:
    """The hashes of a file of tensors as JSON."""
    return {"header_xxh3_128": hashes.header, "tensors_xxh3_128": dict(hashes.tensors)}


def load_hashes(value: Json, what: str) -> Hashes:
    """Read what `dump_hashes` gave.

    Raises:
        DamagedCheckpointError: It is not that.
    """
    fields = as_object(value, what)
    check_keys(fields, {"header_xxh3_128", "tensors_xxh3_128"}, what)
    named = as_object(fields["tensors_xxh3_128"], what)
    tensors = {name: _hash(each, what) for name, each in named.items()}
    return Hashes(_hash(fields["header_xxh3_128"], what), tensors)


def _hash(value: Json, what: str) -> str:
    digest = as_text(value, what)
    if not _HASH.fullmatch(digest):
        raise DamagedCheckpointError(f"{what}: {digest[:40]!r} is no XXH3-128 hash")
    return digest


def dump_tensors(groups: Mapping[str, Mapping[str, TensorRecord]]) -> tuple[list[Json], dict[str, Json]]:
    """The layouts and the tensors of a checkpoint as JSON."""
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
    layouts: Json, tensors: Json, processes: int, what: str
) -> dict[str, dict[str, TensorRecord]]:
    """Read what `dump_tensors` gave.

    Args:
        layouts: Parsed JSON.
        tensors: Likewise.
        processes: How many wrote the checkpoint.
        what: What to call it in messages.

    Raises:
        DamagedCheckpointError: It is not that, or names a process that there was not.
    """
    if not isinstance(layouts, list):
        raise DamagedCheckpointError(f"{what}: layouts is no list")
    known = [_layout(each, processes, f"{what}: layout {number}") for number, each in enumerate(layouts)]
    if sum(each.count for each in known) > MAX_PIECES:
        raise DamagedCheckpointError(f"{what}: the layouts have more than {MAX_PIECES} pieces together")
    lasts = [each.last for each in known]
    return {
        group: {
            name: _record(value, known, lasts, processes, f"{what}: tensors: {group!r}: {name!r}")
            for name, value in as_object(records, f"{what}: tensors: {group!r}").items()
        }
        for group, records in as_object(tensors, f"{what}: tensors").items()
    }


def _record(value: Json, known: list[Layout], lasts: list[int], processes: int, what: str) -> TensorRecord:
    layout, first = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if type(layout) is not int or type(first) is not int:
        raise DamagedCheckpointError(f"{what} is no pair of a layout's and a process's number")
    if not 0 <= layout < len(known):
        raise DamagedCheckpointError(f"{what} has the layout {str(layout)[:40]}; there are {len(known)}")
    if first < 0 or first + lasts[layout] >= processes:
        raise DamagedCheckpointError(
            f"{what} has pieces from process {str(first)[:40]} on; it was saved by {processes}"
        )
    return TensorRecord(known[layout], first)


def _layout(value: Json, processes: int, what: str) -> Layout:
    fields = as_object(value, what)
    check_keys(fields, {"dtype", "shape"} | ({"cuts", "files"} if "cuts" in fields else {"grid"}), what)
    shape = read_sizes(fields["shape"], f"{what}: shape")
    dtype = as_text(fields["dtype"], what)
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{what}: the dtype {dtype[:40]!r} is unknown")
    divided = fields["cuts"] if "cuts" in fields else fields["grid"]
    if not isinstance(divided, list) or len(divided) != len(shape):
        raise DamagedCheckpointError(f"{what}: the cuts are not one list for each dimension")
    if "grid" in fields:
        grid = tuple(_grid(each, f"{what}: grid") for each in divided)
        if math.prod(parts for cuts in grid for parts, _ in cuts) > processes:
            raise DamagedCheckpointError(
                f"{what} has more pieces than the {processes} processes that saved it"
            )
        return Layout(dtype, shape, grid)
    places = tuple(_cuts(each, size, f"{what}: cuts") for each, size in zip(divided, shape, strict=True))
    files = read_numbers(fields["files"], f"{what}: files")
    if len(files) != math.prod(map(len, places)) or len(set(files)) != len(files):
        raise DamagedCheckpointError(
            f"{what}: {len(files)} files for {math.prod(map(len, places))} pieces, which need a file each"
        )
    return Layout(dtype, shape, cuts=places, files=files)


def _grid(value: Json, what: str) -> tuple[Cut, ...]:
    """The cuts of a dimension."""
    if not isinstance(value, list) or len(value) > _MAX_CUTS:
        raise DamagedCheckpointError(f"{what} is no list of at most {_MAX_CUTS} cuts for each dimension")
    cuts = []
    for each in value:
        parts, step = (*read_numbers(each, what), 0, 0)[:2]
        if not isinstance(each, list) or len(each) != 2 or not parts or not step:
            raise DamagedCheckpointError(f"{what} has {str(each)[:40]}, not [parts, step] from 1 on")
        cuts.append((parts, step))
    return tuple(cuts)


_MAX_CUTS = 16
"""Cuts of one dimension: there are as many as dimensions of the processes' mesh."""


def read_numbers(value: Json, what: str) -> tuple[int, ...]:
    """A list of whole numbers that each stand for a process, or count processes.

    Raises:
        DamagedCheckpointError: It is not that.
    """
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise DamagedCheckpointError(f"{what} is no list of whole numbers")
    numbers = tuple(each for each in value if isinstance(each, int))
    if numbers and not (min(numbers) >= 0 and max(numbers) <= MAX_PROCESSES):
        raise DamagedCheckpointError(f"{what} has a number that is not from 0 to {MAX_PROCESSES}")
    return numbers


def _cuts(value: Json, size: int, what: str) -> tuple[int, ...]:
    """Where a dimension is cut: from 0 on, rising, and nowhere but inside."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise DamagedCheckpointError(f"{what} are no list of numbers")
    cuts = tuple(each for each in value if isinstance(each, int))
    rising = all(map(operator.lt, cuts, cuts[1:]))
    if not cuts or cuts[0] != 0 or not rising or (cuts[-1] >= size and cuts != (0,)):
        raise DamagedCheckpointError(f"{what} {cuts[:8]} do not divide a dimension of {size}")
    return cuts


def as_object(value: Json, what: str) -> dict[str, Json]:
    """The value, if it is a JSON object.

    Raises:
        DamagedCheckpointError: It is something else.
    """
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not an object")
    return value


def check_keys(fields: Mapping[str, Json], expected: set[str], what: str) -> None:
    """Check that an object has the keys that it must have, and no others.

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
