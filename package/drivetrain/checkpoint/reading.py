"""How a checkpoint is read: nothing is believed, and what is returned was compared with its hash."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from drivetrain.checkpoint.files import HashedReader
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, UnseenError, os_errors
from drivetrain.checkpoint.format import FORMAT_VERSION, MANIFEST, Manifest, Snapshot
from drivetrain.checkpoint.migrations import steps_from
from drivetrain.checkpoint.records import FileRecord, Piece, TensorRecord
from drivetrain.checkpoint.sharding import Fetch, Like, plan_reads
from drivetrain.checkpoint.strict_json import parse_json
from drivetrain.checkpoint.tensors import DTYPES, TensorSpan, bytes_of, read_header, room_for
from drivetrain.errors import CheckpointError, nearest
from drivetrain.types import Json


class Reader:
    """A checkpoint that is being read.

    Args:
        files: Where.
        path: Its directory.

    Raises:
        DamagedCheckpointError: No checkpoint, or a damaged one.
        CheckpointError: A newer format, or no permission.
    """

    def __init__(self, files: FileSystem, path: str) -> None:
        self.files = files
        self.path = path
        self.manifest = self._read_manifest()
        self._placed: dict[str, dict[str, dict[str, Piece]]] = {}

    def _read_manifest(self) -> Manifest:
        # Also looks for what no checkpoint contains: a symbolic link, which could lead anywhere. Other files
        # that the manifest does not list are never read, and so do not matter.
        with os_errors("read", self.path):
            if self.files.renames and self.files.kind(self.path) != "directory":
                raise UnseenError.of(self.path, f"{self.path!r} is no checkpoint: there is no such directory")
            present = self.files.entries(self.path)
        if MANIFEST not in present:
            raise UnseenError.of(
                self.files.join(self.path, MANIFEST),
                f"{self.path!r} is no checkpoint: it has no {MANIFEST}, so its saving never ended",
            )
        for name in sorted(name for name, kind in present.items() if kind == "link"):
            raise DamagedCheckpointError(
                f"{self.files.join(self.path, name)!r} is a symbolic link; a checkpoint has none"
            )
        path = self.files.join(self.path, MANIFEST)
        with HashedReader(path, self.files) as reader:
            return Manifest.parse(reader.read_json(), repr(path))

    def snapshot(self, groups: Collection[str] | None, like: Like | None) -> Snapshot:
        """The content; see `CheckpointIO.load`."""
        manifest = self.manifest
        for group in groups or ():
            if group not in manifest.tensors:
                raise CheckpointError(
                    f"{self.path!r} has no group of tensors {group!r}. {nearest(group, manifest.tensors)}"
                )
        wanted = [group for group in manifest.tensors if groups is None or group in groups]
        tensors = {group: self._tensors(group, manifest.tensors[group], like) for group in wanted}
        objects = {
            name: self.object(name)
            for name in manifest.objects()
            if name not in manifest.tensors or name in wanted
        }
        return Snapshot(
            tensors, objects, manifest.progress, manifest.metrics, manifest.saved_by.get("task", "")
        )

    def verify(self) -> None:
        """Check every byte, in constant memory; see `drivetrain.checkpoint.verify`."""
        for name in self.manifest.objects():
            self.object(name)
        for group in self.manifest.tensors:
            for file, pieces in self._pieces(group).items():
                with HashedReader(self.files.join(self.path, file), self.files) as reader:
                    spans = self._spans(reader, file, group)
                    for span in sorted(spans.values(), key=lambda span: (span.start, span.stop)):
                        reader.begin_piece(reader.position)
                        reader.skip(span.stop - span.start)
                        reader.check_hash(pieces[span.name].xxh3_128, f"the tensor {span.name!r}")

    def tensor(self, group: str, name: str) -> Tensor:
        """One whole tensor, verified."""
        return self._tensors(group, {name: self.manifest.tensors[group][name]}, None)[name]

    def _tensors(
        self, group: str, records: Mapping[str, TensorRecord], like: Like | None
    ) -> dict[str, Tensor]:
        files = {file: self.manifest.files[file] for file in _files_of(records)}
        self._check_room(records, files)

        def room(name: str) -> Tensor:
            return room_for(records[name].shape, records[name].dtype, f"{self.path!r}: {name!r}")

        results, fetches = plan_reads(records, group, like, room)
        by_file: dict[str, list[Fetch]] = {}
        for fetch in fetches:
            by_file.setdefault(fetch.piece.file, []).append(fetch)
        for file, mine in sorted(by_file.items()):
            with HashedReader(self.files.join(self.path, file), self.files) as reader:
                self._fetch(reader, self._spans(reader, file, group), mine)
        return results

    def _check_room(self, records: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> None:
        """A manifest may claim any shape: memory is given only for bytes that the files really have."""
        claimed = dict.fromkeys(files, 0)
        for record in records.values():
            for piece in record.pieces:
                claimed[piece.file] += math.prod(piece.shape) * DTYPES[record.dtype].itemsize
        for file, told in files.items():
            with HashedReader(self.files.join(self.path, file), self.files) as reader:
                reader.check_size(told.bytes)
                if claimed[file] > reader.size:
                    raise DamagedCheckpointError(
                        f"{reader.path!r} has {reader.size} bytes, too few for the {claimed[file]} of the "
                        "tensors that the manifest places there"
                    )

    def _pieces(self, group: str) -> dict[str, dict[str, Piece]]:
        """What the manifest places in each file of a group, by tensor."""
        # Once for all files: with thousands of files and pieces, looking through all for each takes minutes.
        if group not in self._placed:
            placed: dict[str, dict[str, Piece]] = {}
            for name, record in self.manifest.tensors[group].items():
                for piece in record.pieces:
                    placed.setdefault(piece.file, {})[name] = piece
            self._placed[group] = dict(sorted(placed.items()))
        return self._placed[group]

    def _spans(self, reader: HashedReader, file: str, group: str) -> dict[str, TensorSpan]:
        """Where the tensors of a file lie, compared with the pieces that the manifest places there."""
        told = self.manifest.files[file]
        reader.check_size(told.bytes)
        spans = {span.name: span for span in read_header(reader, told.xxh3_128)}
        found = {span.name: (span.shape, span.dtype) for span in spans.values()}
        records = self.manifest.tensors[group]
        expected = {
            name: (piece.shape, records[name].dtype) for name, piece in self._pieces(group)[file].items()
        }
        if found != expected:
            either = found.keys() | expected.keys()
            name = min(each for each in either if found.get(each) != expected.get(each))
            raise DamagedCheckpointError(
                f"{reader.path!r}: the tensor {name!r} of the group {group!r} is "
                f"{_describe(found.get(name))}, but {_describe(expected.get(name))} in the manifest"
            )
        return spans

    def _fetch(self, reader: HashedReader, spans: Mapping[str, TensorSpan], fetches: list[Fetch]) -> None:
        """Fill the targets, in the order of the file."""
        begin = reader.position
        boxes: dict[str, list[Fetch]] = {}
        for fetch in fetches:
            boxes.setdefault(fetch.name, []).append(fetch)
        for name in sorted(boxes, key=lambda name: spans[name].start):
            span, first = spans[name], boxes[name][0]
            reader.begin_piece(begin + span.start)
            # Straight to where it belongs, if that is one block of memory; else through one piece's memory.
            direct = len(boxes[name]) == 1 and first.is_whole and first.target.is_contiguous()
            piece = first.target if direct else room_for(span.shape, span.dtype, f"{reader.path!r}: {name!r}")
            if span.stop > span.start:
                reader.read_into(bytes_of(piece))
            reader.check_hash(first.piece.xxh3_128, f"the tensor {name!r}")
            if direct:
                continue
            for fetch in boxes[name]:
                ends = (start + length for start, length in zip(fetch.start, fetch.target.shape, strict=True))
                with torch.no_grad():
                    fetch.target.copy_(piece[tuple(map(slice, fetch.start, ends))])

    def object(self, name: str) -> Json:
        """One object, verified; its name is a key of `Manifest.objects`."""
        file = self.manifest.objects()[name]
        path, record = self.files.join(self.path, file), self.manifest.files[file]
        with HashedReader(path, self.files) as reader:
            reader.check_size(record.bytes)
            data = reader.read_json()
            reader.check_hash(record.xxh3_128)
        value = parse_json(data, repr(path))
        for step in steps_from(self.manifest.format_version, FORMAT_VERSION, repr(path)):
            value = step.object(name, value)
        return value


def _files_of(records: Mapping[str, TensorRecord]) -> list[str]:
    return sorted({piece.file for record in records.values() for piece in record.pieces})


def _describe(tensor: tuple[Iterable[int], str] | None) -> str:
    return "missing" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"
