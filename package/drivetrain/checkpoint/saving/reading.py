"""Read checkpoints. Nothing is trusted: all returned content has been checked against its hash."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.format.asset_files import ASSETS, load_assets
from drivetrain.checkpoint.format.manifest import MANIFEST, Manifest, Snapshot
from drivetrain.checkpoint.format.records import (
    FileRecord,
    Piece,
    TensorRecord,
    file_name,
    hashes_name,
    load_hashes,
)
from drivetrain.checkpoint.format.strict_json import parse_json
from drivetrain.checkpoint.format.tensors import DTYPES, Hashes, TensorSpan, bytes_of, read_header, room_for
from drivetrain.checkpoint.saving.sharding import Box, Like, box_to_read, is_sharded
from drivetrain.checkpoint.storage.files import HashedReader
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError, nearest
from drivetrain.core.types import Json


class Reader:
    """A checkpoint that is being read.

    Raises:
        DamagedCheckpointError: There is no checkpoint, or a damaged one.
        CheckpointError: The format is newer, or there is no permission.
    """

    def __init__(self, files: FileSystem, path: str) -> None:
        self.files = files
        self.path = path
        self.manifest = self._read_manifest()
        self._by_record: dict[str, dict[TensorRecord, list[str]]] = {}

    def _read_manifest(self) -> Manifest:
        # Symbolic links raise, because they could lead anywhere. Other files that the manifest does not list
        # are never read, so they do not matter.
        with os_errors("read", self.path):
            if self.files.renames and self.files.kind(self.path) != "directory":
                raise DamagedCheckpointError(f"{self.path!r} is not a checkpoint: no such directory")
            present = self.files.entries(self.path)
        if MANIFEST not in present:
            raise DamagedCheckpointError(
                f"{self.path!r} is not a checkpoint: it has no {MANIFEST}, so its save never finished"
            )
        for name in sorted(name for name, kind in present.items() if kind == "link"):
            raise DamagedCheckpointError(
                f"{self.files.join(self.path, name)!r} is a symbolic link; checkpoints hold plain files"
            )
        path = self.files.join(self.path, MANIFEST)
        with HashedReader(path, self.files) as reader:
            self._manifest_bytes = reader.size
            return Manifest.parse(reader.read_json(), repr(path))

    def snapshot(self, groups: Collection[str] | None, like: Like | None) -> Snapshot:
        """Read the content; see `CheckpointIO.load`."""
        manifest = self.manifest
        for group in groups or ():
            if group not in manifest.tensors:
                raise CheckpointError(
                    f"{self.path!r} has no group {group!r}. {nearest(group, manifest.tensors)}"
                )
        wanted = [group for group in manifest.tensors if groups is None or group in groups]
        tensors = {group: self._tensors(group, manifest.tensors[group], like) for group in wanted}
        objects = {
            name: self.object(name)
            for name in manifest.objects()
            if name != ASSETS and (name not in manifest.tensors or name in wanted)
        }
        return Snapshot(
            tensors, objects, manifest.progress, manifest.metrics, manifest.saved_by.get("task", "")
        )

    def verify(self, advance: Callable[[int], object] = lambda count: None) -> None:
        """Check every byte, in constant memory; see `drivetrain.checkpoint.verify`.

        Args:
            advance: Called after each tensor with its number of bytes.
        """
        for name in self.manifest.objects():
            self.object(name)
        for name in self.assets:
            with self._open_asset(name) as reader:
                reader.skip(reader.size)
                reader.check_hash(self.assets[name].xxh3_128)
        for group, records in self.manifest.tensors.items():
            seen = 0
            for number in range(self.manifest.processes):
                file = file_name(group, number, self.manifest.processes)
                if file not in self.manifest.files:
                    continue
                hashes = self.hashes(file)
                with self._open(file) as reader:
                    spans, _ = self._spans(reader, group, number, hashes)
                    for span in spans.values():
                        reader.begin_piece(reader.position)
                        reader.skip(span.stop - span.start)
                        reader.check_hash(hashes.tensors[span.name], f"the tensor {span.name!r}")
                        advance(span.stop - span.start)
                seen += len(spans)
            if seen != sum(record.count for record in records.values()):
                for record in records.values():
                    for number in sorted(record.writers((0,) * len(record.shape), record.shape)):
                        self._record(file_name(group, number, self.manifest.processes))

    @cached_property
    def assets(self) -> dict[str, FileRecord]:
        """The files stored beside the weights, by their paths in the folder `assets`."""
        if ASSETS not in self.manifest.objects():
            return {}
        return load_assets(self.object(ASSETS), repr(self.files.join(self.path, f"{ASSETS}.json")))

    @property
    def size(self) -> int:
        """The size of all files, except those with the hashes of several processes' pieces."""
        return sum((*self.sizes.values(), *(each.bytes for each in self.assets.values())))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file by name, except assets and hashes; what the manifest holds is in its size."""
        listed = self.manifest.files.items()
        return {
            **{name: record.bytes for name, record in listed if record.content is None},
            MANIFEST: self._manifest_bytes,
        }

    def asset(self, name: str) -> bytes:
        """Read one of `assets`, and verify it."""
        with self._open_asset(name) as reader:
            content = reader.read(reader.size)
            reader.check_hash(self.assets[name].xxh3_128)
        return bytes(content)

    def _open_asset(self, name: str) -> HashedReader:
        """Open an asset, and check its size and that no folder on the way to it is a link."""
        *folders, last = f"{ASSETS}/{name}".split("/")
        path = self.path
        for folder in folders:
            path = self.files.join(path, folder)
            with os_errors("read", path):
                if self.files.renames and self.files.kind(path) != "directory":
                    raise DamagedCheckpointError(f"{path!r} is missing, or not a folder; it holds {name!r}")
        return self._checked(self.files.join(path, last), self.assets[name])

    def tensor(self, group: str, name: str) -> Tensor:
        """Read one whole tensor, and verify it."""
        return self._tensors(group, {name: self.manifest.tensors[group][name]}, None)[name]

    def hashes(self, file: str) -> Hashes:
        """Return the verified hashes of a tensor file."""
        record = self._record(file)
        if record.hashes is not None:
            return record.hashes
        path = self.files.join(self.path, hashes_name(file))
        with HashedReader(path, self.files) as reader:
            data = reader.read_json()
            reader.check_hash(record.xxh3_128)
        return load_hashes(parse_json(data, repr(path)), repr(path))

    def _record(self, file: str) -> FileRecord:
        if file not in self.manifest.files:
            raise DamagedCheckpointError(
                f"{self.files.join(self.path, MANIFEST)!r} places tensors in {file!r}, which it does not list"
            )
        return self.manifest.files[file]

    def _open(self, file: str) -> HashedReader:
        """Open a file that the manifest lists or holds, and check its size."""
        record = self._record(file)
        path = self.files.join(self.path, file if record.content is None else f"{MANIFEST}: {file}")
        return self._checked(path, record)

    def _checked(self, path: str, record: FileRecord) -> HashedReader:
        """Open a file, and check its size."""
        source = None if record.content is None else io.BytesIO(record.content)
        reader = HashedReader(path, self.files, source)
        try:
            reader.check_size(record.bytes)
        except DamagedCheckpointError:
            reader.close()
            raise
        return reader

    def _tensors(
        self, group: str, records: Mapping[str, TensorRecord], like: Like | None
    ) -> dict[str, Tensor]:
        patterns: dict[str, Any] = {
            name: pattern
            for name, each in records.items()
            if is_sharded(pattern := like and like(group, name, each.shape))
        }
        boxes = {name: box_to_read(name, each.shape, patterns.get(name)) for name, each in records.items()}
        # By layout, not by tensor: with thousands of processes there are millions of pieces.
        kinds = {
            (record, *boxes[name])
            for name, record in records.items()
            if name not in patterns or all(boxes[name][1])  # an uneven division gives some processes no rows
        }
        numbers = set().union(*(record.writers(*box) for record, *box in kinds))
        names = {number: file_name(group, number, self.manifest.processes) for number in sorted(numbers)}
        whole = {name: record for name, record in records.items() if name not in patterns}
        self._check_room(whole, names.values())
        results: dict[str, Tensor] = {}
        targets: dict[str, Tensor] = {}
        for name, record in records.items():
            if name in patterns:
                sharded: Any = torch.empty_like(patterns[name], dtype=DTYPES[record.dtype])
                results[name], targets[name] = sharded, sharded.to_local()
            else:
                room = room_for(record.shape, record.dtype, f"{self.path!r}: {name!r}")
                results[name] = targets[name] = room
        for number, file in names.items():
            hashes = self.hashes(file)
            with self._open(file) as reader:
                spans, pieces = self._spans(reader, group, number, hashes)
                begin = reader.position
                for name, span in spans.items():
                    if name in whole or (name in patterns and _overlap(pieces[name], boxes[name])):
                        reader.begin_piece(begin + span.start)
                        _fill(reader, span, hashes, pieces[name], targets[name], boxes[name][0])
        return results

    def _kinds(self, group: str) -> dict[TensorRecord, list[str]]:
        """Return a group's tensors by record, because many share one; cached, because each file needs it."""
        if group not in self._by_record:
            kinds = self._by_record[group] = {}
            for name, record in self.manifest.tensors[group].items():
                kinds.setdefault(record, []).append(name)
        return self._by_record[group]

    def _check_room(self, records: Mapping[str, TensorRecord], names: Iterable[str]) -> None:
        """Check that the files are large enough for the shapes in the manifest, before allocating memory."""
        claimed = sum(record.layout.bytes for record in records.values())
        there = 0
        for name in names if claimed else ():
            with self._open(name) as reader:
                there += reader.size
        if claimed > there:
            raise DamagedCheckpointError(
                f"the files of {self.path!r} have {there} bytes, too few for the {claimed} of the tensors"
                " that the manifest places there"
            )

    def _spans(
        self, reader: HashedReader, group: str, number: int, hashes: Hashes
    ) -> tuple[dict[str, TensorSpan], dict[str, Piece]]:
        """Return a file's tensors in its order, and their pieces in the manifest, which must match."""
        spans = {span.name: span for span in read_header(reader, hashes.header)}
        found = {span.name: (span.shape, span.dtype) for span in spans.values()}
        records = self.manifest.tensors[group]
        pieces = {
            name: piece
            for record, names in self._kinds(group).items()
            if (piece := record.piece(number)) is not None
            for name in names
        }
        expected = {name: (piece.shape, records[name].dtype) for name, piece in pieces.items()}
        if found != expected:
            either = found.keys() | expected.keys()
            name = min(each for each in either if found.get(each) != expected.get(each))
            raise DamagedCheckpointError(
                f"{reader.path!r}: the tensor {name!r} of the group {group!r} is "
                f"{_describe(found.get(name))}, but {_describe(expected.get(name))} in the manifest"
            )
        if hashes.tensors.keys() != spans.keys():
            name = min(hashes.tensors.keys() ^ spans.keys())
            raise DamagedCheckpointError(f"{reader.path!r}: {name!r} is in the file or has a hash, not both")
        return spans, pieces

    def object(self, name: str) -> Json:
        """Read one object, and verify it; its name is a key of `Manifest.objects`."""
        file = self.manifest.objects()[name]
        with self._open(file) as reader:
            data = reader.read_json()
            reader.check_hash(self.manifest.files[file].xxh3_128)
        return parse_json(data, repr(reader.path))


def open_checkpoint(path: str) -> Reader:
    """Open a checkpoint, and read and verify its manifest; `path` must not be a run directory.

    Raises:
        DamagedCheckpointError: There is no checkpoint, or a damaged one.
        CheckpointError: The format is newer, or there is no permission.
    """
    files = file_system(path)
    return Reader(files, files.absolute(path))


def _overlap(piece: Piece, box: Box) -> bool:
    """Return whether a piece and a box of a tensor overlap."""
    offset, shape = box
    sides = zip(piece.offset, piece.shape, offset, shape, strict=True)
    return all(max(at, start) < min(at + size, start + length) for at, size, start, length in sides)


def _fill(
    reader: HashedReader,
    span: TensorSpan,
    hashes: Hashes,
    piece: Piece,
    target: Tensor,
    begin: tuple[int, ...],
) -> None:
    """Read a piece, verify it, and copy its overlap with a box into the box.

    Args:
        reader: The file, positioned at the piece.
        begin: The offset of the box in the whole tensor.
    """
    starts = [max(each) for each in zip(piece.offset, begin, strict=True)]
    stops = [
        min(offset + size, first + length)
        for offset, size, first, length in zip(piece.offset, piece.shape, begin, target.shape, strict=True)
    ]

    def part(of: Tensor, offset: tuple[int, ...]) -> Tensor:
        slices = (slice(start - at, stop - at) for start, stop, at in zip(starts, stops, offset, strict=True))
        return of[tuple(slices)]

    with torch.no_grad():
        view = part(target, begin)
        # Read directly into the target if it is one block of memory; otherwise through a buffer.
        direct = tuple(view.shape) == piece.shape and view.is_contiguous() and view.device.type == "cpu"
        memory = view if direct else room_for(span.shape, span.dtype, f"{reader.path!r}: {span.name!r}")
        if span.stop > span.start:
            reader.read_into(bytes_of(memory))
        reader.check_hash(hashes.tensors[span.name], f"the tensor {span.name!r}")
        if not direct:
            view.copy_(part(memory, piece.offset))


def _describe(tensor: tuple[Iterable[int], str] | None) -> str:
    return "missing" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"
