"""How the files of a checkpoint are written: each process its share, then one of them the commit record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import xxhash

from drivetrain.checkpoint.files import write_file
from drivetrain.checkpoint.filesystem import FileSystem, os_errors
from drivetrain.checkpoint.format import MANIFEST, Manifest, Part, Snapshot, check_part_name
from drivetrain.checkpoint.records import TENSORS, FileRecord, Piece, TensorRecord
from drivetrain.checkpoint.sharding import Parts
from drivetrain.checkpoint.strict_json import dump_json
from drivetrain.checkpoint.tensors import CODES, Hashes, tensor_chunks
from drivetrain.distributed.ranks import Ranks


@dataclass(slots=True)
class Written:
    """What one process has written.

    Attributes:
        files: Its files.
        tensors: Group to name to the tensor, with this process's pieces.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, dict[str, TensorRecord]] = field(default_factory=dict)


class Place:
    """A directory that a checkpoint is being written to.

    Args:
        files: Where.
        directory: The directory.
        final: What it will be called, for messages.
    """

    def __init__(self, files: FileSystem, directory: str, final: str) -> None:
        self.files = files
        self.directory = directory
        self.final = final

    def write_share(self, parts: Parts, ranks: Ranks) -> Written:
        """Write this process's part of every tensor, a file for each group.

        Raises:
            CheckpointError: It could not be written.
        """
        written = Written()
        for group, named in parts.items():
            check_part_name(group, "a group of tensors")
            # The name says how many there are, so that whoever looks at a directory knows whether it is all.
            file = (
                f"{group}{TENSORS}"
                if ranks.size == 1
                else f"{group}-{ranks.rank + 1:05d}-of-{ranks.size:05d}{TENSORS}"
            )
            hashes = Hashes()
            if named:
                tensors = {name: part.tensor for name, part in named.items()}
                with os_errors("write", self.files.join(self.final, file)):
                    chunks = tensor_chunks(tensors, f"the group {group!r}", hashes)
                    path = self.files.join(self.directory, file)
                    size = write_file(path, chunks, self.files)
                written.files[file] = FileRecord(size, hashes.header)
            written.tensors[group] = {
                name: _record(file, part, hashes.tensors[name]) for name, part in named.items()
            }
        return written

    def write_rest(self, shares: list[Written], snapshot: Snapshot) -> None:
        """Write everything that is no tensor, and the manifest last.

        Raises:
            CheckpointError: It could not be written.
        """
        written = _merged(shares, snapshot.tensors)
        for name, value in snapshot.objects.items():
            file = f"{check_part_name(name, 'an object')}.json"
            data = dump_json(value, f"the object {name!r}")
            with os_errors("write", self.files.join(self.final, file)):
                path = self.files.join(self.directory, file)
                written.files[file] = FileRecord(
                    write_file(path, [data], self.files), xxhash.xxh3_128_hexdigest(data)
                )
        manifest = Manifest(written.files, written.tensors, snapshot.progress, snapshot.metrics)
        manifest.saved_by["task"] = snapshot.task
        with os_errors("write", self.files.join(self.final, MANIFEST)):
            # The directory first, so that no order of the disk's writes gives a manifest whose files have no
            # names.
            self.files.sync(self.directory)
            path = self.files.join(self.directory, MANIFEST)
            write_file(path, [manifest.dump()], self.files)
            self.files.sync(self.directory)


def _record(file: str, part: Part, digest: str) -> TensorRecord:
    piece = Piece(file, part.offset, tuple(part.tensor.shape), digest)
    return TensorRecord(part.shape, CODES[part.tensor.dtype], (piece,))


def _merged(shares: list[Written], order: Mapping[str, Mapping[str, object]]) -> Written:
    """All shares as one: the pieces of each tensor together, the tensors in the snapshot's order."""
    whole = Written()
    for share in shares:
        whole.files.update(share.files)
    for group, names in order.items():
        records: dict[str, TensorRecord] = {}
        for share in shares:
            for name, record in share.tensors.get(group, {}).items():
                known = records.get(name)
                records[name] = replace(record, pieces=(known.pieces if known else ()) + record.pieces)
        whole.tensors[group] = {name: records[name] for name in names}
    return whole
