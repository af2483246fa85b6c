"""How the files of a checkpoint are written: each process its share, then one of them the commit record."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from drivetrain.checkpoint.files import Bytes, write_file
from drivetrain.checkpoint.filesystem import FileSystem, os_errors
from drivetrain.checkpoint.format import MANIFEST, Manifest, Plan, Snapshot, check_part_name
from drivetrain.checkpoint.records import FileRecord, dump_hashes, file_name, hashes_name
from drivetrain.checkpoint.strict_json import dump_json
from drivetrain.checkpoint.tensors import Hashes, tensor_chunks


class Place:
    """A directory that a checkpoint is being written to.

    Args:
        files: Where.
        directory: The directory.
        final: Its name once it is committed, for messages.

    Attributes:
        is_committed: Whether the checkpoint is committed; it must not be deleted from then on.
    """

    def __init__(self, files: FileSystem, directory: str, final: str) -> None:
        self.files = files
        self.directory = directory
        self.final = final
        self.is_committed = False

    def write_share(self, plan: Plan, rank: int) -> dict[str, FileRecord]:
        """Write the part of every tensor that is this process's, a file for each group.

        Several processes write the hashes of their pieces beside each file: together these are too many for a
        manifest that all of them read. A process alone hands its hashes over for the manifest.

        Raises:
            CheckpointError: It could not be written.
        """
        written: dict[str, FileRecord] = {}
        for group, tensors in plan.parts.items():
            check_part_name(group, "a group of tensors")
            if not tensors:
                continue
            file = file_name(group, rank, plan.processes)
            hashes = Hashes()
            size = self._write(file, tensor_chunks(tensors, f"the group {group!r}", hashes))
            if plan.processes == 1:
                written[file] = FileRecord(size, hashes=hashes)
                continue
            data = dump_json(dump_hashes(hashes), f"the hashes of {file}")
            self._write(hashes_name(file), [data])
            written[file] = FileRecord(size, xxhash.xxh3_128_hexdigest(data))
        return written

    def _write(self, file: str, chunks: Iterable[Bytes]) -> int:
        with os_errors("write", self.files.join(self.final, file)):
            return write_file(self.files.join(self.directory, file), chunks, self.files)

    def write_rest(self, shares: list[dict[str, FileRecord]], plan: Plan, snapshot: Snapshot) -> None:
        """Write everything that is no tensor, and the manifest last.

        Args:
            shares: What `write_share` gave, of every process.
            plan: The first process's.
            snapshot: The content.

        Raises:
            CheckpointError: It could not be written.
        """
        written = {file: record for share in shares for file, record in share.items()}
        for name, value in snapshot.objects.items():
            file = f"{check_part_name(name, 'an object')}.json"
            data = dump_json(value, f"the object {name!r}")
            written[file] = FileRecord(self._write(file, [data]), xxhash.xxh3_128_hexdigest(data))
        manifest = Manifest(
            written, plan.records, snapshot.progress, snapshot.metrics, processes=plan.processes
        )
        manifest.saved_by["task"] = snapshot.task
        data = manifest.dump()
        # The directory first, so that no order of the disk's writes gives a manifest whose files have no
        # names.
        with os_errors("write", self.files.join(self.final, MANIFEST)):
            self.files.sync(self.directory)
        self._write(MANIFEST, [data])
        with os_errors("write", self.files.join(self.final, MANIFEST)):
            self.files.sync(self.directory)
