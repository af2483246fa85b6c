"""How a checkpoint gets to storage and back: the protocol, and its implementation for all storage."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Protocol, TypeAlias

import xxhash

from drivetrain.checkpoint.files import REMOVING, SAVING, Bytes, delete_if_there, write_file
from drivetrain.checkpoint.filesystem import FileSystem, os_errors
from drivetrain.checkpoint.format import MANIFEST, Manifest, Plan, Snapshot, check_part_name
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.reading import Reader
from drivetrain.checkpoint.records import FileRecord, dump_hashes, file_name, hashes_name
from drivetrain.checkpoint.sharding import Like, plan_save
from drivetrain.checkpoint.strict_json import dump_json
from drivetrain.checkpoint.tensors import Hashes, tensor_chunks
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import CheckpointError

Names: TypeAlias = list[str]
"""Needed because inside the classes below `list` is a method."""

UNFINISHED = ".saving"
"""Stands in a checkpoint that is being saved, or removed, where directories cannot be renamed."""

_BAD = re.compile(r"\.bad(-\d+)?$")


class CheckpointIO(Protocol):
    """Where checkpoints are stored.

    Five methods, because a checkpoint manager asks five things of a storage: keep this whole or not at all,
    give it back unaltered, is it there, what is there, and forget it. Intervals, numbers to keep and which is
    best are the manager's, not the storage's. A checkpoint is committed or it does not exist: no method shows
    a half.

    Paths are `str`, not `pathlib.Path`, because `Path("s3://bucket/run")` is `s3:/bucket/run`, another place.
    """

    def save(self, path: str, snapshot: Snapshot) -> None:
        """Write and commit a new checkpoint; durable on return. Several processes save one together.

        Raises:
            CheckpointError: Something is there already, or it could not be written; nothing is left behind
                then. Only if the last sync failed, or an answer was lost, may it be there, and then it is
                whole.
        """
        ...

    def load(self, path: str, groups: Collection[str] | None = None, *, like: Like | None = None) -> Snapshot:
        """Read a checkpoint; every byte of it that is returned was compared with its hash.

        Args:
            path: Of a committed checkpoint.
            groups: The groups of tensors to read; None for all. An object with the name of a group is read
                with it, and every other object always: ``("model",)`` gives the weights and "hparams", but no
                "state".
            like: Given the group, name and shape of a stored tensor, returns a `DTensor` that is sharded as
                the result shall be: each process then reads its own shard only. If it returns None or another
                tensor, or is None, the whole tensor is read.

        Raises:
            DamagedCheckpointError: Not there, or not what was written.
            CheckpointError: A group that it does not have, a newer format, or no permission to read.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a committed checkpoint, damaged or not.

        Raises:
            CheckpointError: It cannot be told: no permission to look, or a fault.
        """
        ...

    def list(self, directory: str) -> Names:
        """The names of the committed checkpoints in a directory, in no order; none if it does not exist."""
        ...

    def remove(self, path: str) -> None:
        """Delete a committed checkpoint; at no moment is a part of it taken for a checkpoint.

        Raises:
            CheckpointError: It is no checkpoint, or it could not be deleted.
        """
        ...


class DirectoryCheckpointIO:
    """Checkpoints as directories: of a disk, or, for paths such as "s3://bucket/run", of an object store.

    Args:
        files: Where; None to tell by each path.
        ranks: The processes that save and load together.
    """

    def __init__(self, files: FileSystem | None = None, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._files = files

    def save(self, path: str, snapshot: Snapshot) -> None:
        """Write beside the final place, sync, the manifest last, then rename; see `CheckpointIO.save`."""
        files, path = self._at(path)
        # The tensors of an object, such as the state of a run, are one process's with that object.
        plan = snapshot.plan or plan_save(snapshot.tensors, snapshot.objects.keys(), self.ranks)
        place = Place(files, self.ranks.first(lambda: _begin(files, path)), path)
        try:
            shares = self.ranks.together(lambda: place.write_share(plan, self.ranks.rank))
            self.ranks.first(lambda: _commit(place, shares, plan, snapshot))
        except BaseException:
            if self.ranks.rank == 0 and not place.is_committed:
                with suppress(OSError):  # the first cause is on its way; the next open tries again
                    discard(place.directory, files)
            raise

    def load(self, path: str, groups: Collection[str] | None = None, *, like: Like | None = None) -> Snapshot:
        """Read each file once, hashing on the way; see `CheckpointIO.load`."""
        files, path = self._at(path)
        return Reader(files, path).snapshot(groups, like)

    def exists(self, path: str) -> bool:
        """Whether `path` is a directory with a manifest; see `CheckpointIO.exists`."""
        files, path = self._at(path)
        with os_errors("look into", path):
            return files.kind(files.join(path, MANIFEST)) == "file"

    def list(self, directory: str) -> Names:
        """Directories with a manifest that are not hidden, linked or set aside; see `CheckpointIO.list`."""
        files, directory = self._at(directory)
        with os_errors("list", directory):
            return [
                name
                for name, kind in files.entries(directory).items()
                if kind == "directory"
                and not name.startswith(".")
                and not is_set_aside(name)
                and self.exists(files.join(directory, name))
            ]

    def remove(self, path: str) -> None:
        """Rename away, then delete, so that a kill half-way leaves no half; see `CheckpointIO.remove`."""
        files, path = self._at(path)
        with os_errors("remove", path):
            if not self.exists(path) or (files.renames and files.kind(path) != "directory"):
                raise CheckpointError(
                    f"{path!r} is not removed: it is no checkpoint (a directory with a {MANIFEST})"
                )
            parent, name = files.split(path)
            doomed = path
            if files.renames:
                doomed = files.join(parent, f"{REMOVING}{name}-{secrets.token_hex(4)}")
                files.rename(path, doomed)
                # Else a power cut could undo this, and not what is deleted next.
                files.sync(parent)
            else:
                write_file(files.join(path, UNFINISHED), [], files)
            discard(doomed, files)
            files.sync(parent)

    def _at(self, path: str) -> tuple[FileSystem, str]:
        files = file_system(path) if self._files is None else self._files
        return files, files.absolute(path)


class Place:
    """A directory that a checkpoint is being written to: by each process its share, by one the manifest.

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


def read_manifest(path: str) -> Manifest:
    """The verified manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: No checkpoint, or a damaged one.
        CheckpointError: A newer format, or no permission.
    """
    files = file_system(path)
    return Reader(files, files.absolute(path)).manifest


def verify(path: str) -> Manifest:
    """Check every byte of a checkpoint, in constant memory.

    Returns:
        Its manifest.

    Raises:
        DamagedCheckpointError: Names the file and what is wrong with it.
        CheckpointError: A newer format, or no permission.
    """
    files = file_system(path)
    reader = Reader(files, files.absolute(path))
    reader.verify()
    return reader.manifest


def discard(directory: str, files: FileSystem) -> None:
    """Delete what is unfinished, or to be removed; a kill half-way leaves what is known as that.

    Raises:
        OSError: Something could not be deleted.
    """
    if not files.renames:
        # The manifest first, so that no half is a checkpoint; the mark last, so that a rest still has it.
        for name in sorted(files.entries(directory), key=lambda name: name != MANIFEST):
            if name != UNFINISHED:
                files.delete(files.join(directory, name))
    files.delete(directory)


def is_set_aside(name: str) -> bool:
    """Whether a name says that what has it was set aside as damaged."""
    return _BAD.search(name) is not None


def free_bad_name(path: str, files: FileSystem) -> str:
    """Where something damaged is set aside: `path` with the first of ``.bad``, ``.bad-2``... that is free."""
    candidate = f"{path}.bad"
    number = 1
    while files.kind(candidate) is not None:
        number += 1
        candidate = f"{path}.bad-{number}"
    return candidate


def _begin(files: FileSystem, path: str) -> str:
    """Make the directory that a new checkpoint is written to."""
    parent, name = files.split(path)
    with os_errors("create", path):
        _check_free(files, path, name)
        temporary = path
        if files.renames:
            temporary = files.join(parent, f"{SAVING}{name}-{secrets.token_hex(4)}")
        try:
            if files.renames:
                files.make_directory(temporary)
            else:
                write_file(files.join(path, UNFINISHED), [], files)
        except BaseException:
            delete_if_there(temporary, files)
            raise
        return temporary


def _check_free(files: FileSystem, path: str, name: str) -> None:
    if name.startswith(".") or is_set_aside(name):
        raise CheckpointError(
            f"a checkpoint cannot be named {name!r}: names that start with '.' or end with '.bad' (or "
            "'.bad-2'...) are reserved for unfinished and damaged ones"
        )
    if files.kind(path) is not None:
        is_checkpoint = files.kind(files.join(path, MANIFEST)) is not None
        kind = "a checkpoint" if is_checkpoint else "something that is no checkpoint"
        raise CheckpointError(
            f"cannot save to {path!r}: {kind} is there already, and nothing is ever overwritten. "
            "Choose another name"
        )


def _commit(place: Place, shares: list[dict[str, FileRecord]], plan: Plan, snapshot: Snapshot) -> None:
    place.write_rest(shares, plan, snapshot)
    files = place.files
    if not files.renames:
        # The manifest has committed it. A marker that stays beside the manifest means nothing.
        place.is_committed = True
        delete_if_there(files.join(place.directory, UNFINISHED), files)
        return
    with os_errors("commit", place.final):
        files.rename(place.directory, place.final)
        place.is_committed = True
        files.sync(files.split(place.final)[0])
