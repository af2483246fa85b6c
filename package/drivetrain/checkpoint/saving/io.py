"""Save and load whole checkpoints: the protocol `CheckpointIO`, and its implementation for all storage."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import PurePosixPath
from typing import Protocol, TypeAlias

import xxhash

from drivetrain.checkpoint.format.asset_files import ASSETS, dump_assets
from drivetrain.checkpoint.format.manifest import MANIFEST, Manifest, SavePlan, Snapshot, check_part_name
from drivetrain.checkpoint.format.records import FileRecord, dump_hashes, file_name, hashes_name
from drivetrain.checkpoint.format.strict_json import dump_json
from drivetrain.checkpoint.format.tensors import Hashes, tensor_chunks
from drivetrain.checkpoint.saving.reading import Reader, open_checkpoint
from drivetrain.checkpoint.saving.sharding import Like, plan_save
from drivetrain.checkpoint.storage.files import Bytes, delete_if_there, write_chunks, write_file
from drivetrain.checkpoint.storage.filesystem import REMOVING, SAVING, FileSystem, Sink, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks

Names: TypeAlias = list[str]
"""An alias: inside the classes below, `list` is a method."""

UNFINISHED = ".saving"
"""A marker file in a checkpoint that is being saved or removed, where directories cannot be renamed."""

_BAD = re.compile(r"\.bad(-\d+)?$")

SMALL = 1 << 16
"""The most bytes of an object, or of the file of tensors that belong to one, that the manifest holds.

A file of its own takes a sync and a deletion on a disk, and in an object store three requests: to write, read
and delete it.
"""

_TOGETHER = 64
"""The largest number of files that are open at a time, to be synced together."""


class CheckpointIO(Protocol):
    """The storage of checkpoints.

    It has five methods, because a checkpoint manager needs five things: save a checkpoint completely or not
    at all, load it unaltered, test for it, list all, and remove one. Intervals, the number to keep and the
    best one are the manager's business. A checkpoint is committed or does not exist: no method shows a
    partial one.

    Paths are `str`, not `pathlib.Path`: `Path("s3://bucket/run")` is `s3:/bucket/run`, another address.
    """

    def save(self, path: str, snapshot: Snapshot) -> None:
        """Write and commit a new checkpoint; durable on return. Several processes save one together.

        Raises:
            CheckpointError: The path exists, or the write failed; nothing is left behind. If only the last
                sync failed, or an answer was lost, the checkpoint may exist; it is then complete.
        """
        ...

    def load(self, path: str, groups: Collection[str] | None = None, *, like: Like | None = None) -> Snapshot:
        """Read a checkpoint; every returned byte has been checked against its hash.

        Args:
            path: The path of a committed checkpoint.
            groups: The groups of tensors to read; None reads all. An object with the name of a group is read
                only with that group; all other objects are always read: ``("model",)`` gives the weights and
                "hparams", but no "state".
            like: A function from the group, name and shape of a stored tensor to a `DTensor` with the
                sharding of the result: each process then reads only its shard. Without a function, or if it
                returns None or a plain tensor, the whole tensor is read.

        Raises:
            DamagedCheckpointError: The checkpoint is missing or damaged.
            CheckpointError: A group is missing, the format is newer, or there is no permission to read.
        """
        ...

    def exists(self, path: str) -> bool:
        """Return whether there is a committed checkpoint, damaged or not.

        Raises:
            CheckpointError: The storage cannot be read: no permission, or a fault.
        """
        ...

    def list(self, directory: str) -> Names:
        """Return the names of a directory's committed checkpoints, in any order; empty if it is missing."""
        ...

    def remove(self, path: str) -> None:
        """Delete a committed checkpoint; a partly deleted one never counts as a checkpoint.

        Raises:
            CheckpointError: The path is not a checkpoint, or could not be deleted.
        """
        ...


class DirectoryCheckpointIO:
    """Checkpoints as directories: on a disk or, for paths such as "s3://bucket/run", in an object store.

    Args:
        files: The file system; None chooses it by each path.
        ranks: The processes that save and load together.
    """

    def __init__(self, files: FileSystem | None = None, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._files = files

    def save(self, path: str, snapshot: Snapshot) -> None:
        """Write to a temporary directory, the manifest last, sync, then rename; see `CheckpointIO.save`."""
        files, path = self._at(path)
        # A group with an object, such as the state of a run, belongs to the process that saves the object.
        plan = snapshot.plan or plan_save(snapshot.tensors, snapshot.objects.keys(), self.ranks)
        written = UnfinishedCheckpoint(files, self.ranks.first(lambda: _begin(files, path)), path)
        try:
            own = snapshot.objects.keys()
            with self.ranks.jointly() as joint:
                joint.mine = written.write_share(plan, self.ranks.rank, own)
            self.ranks.first(lambda: _commit(written, joint.of_all, plan, snapshot))
        except BaseException:
            if self.ranks.rank == 0 and not written.is_committed:
                with suppress(OSError):  # the first error is already propagating; the next open tries again
                    discard(written.directory, files)
            raise

    def load(self, path: str, groups: Collection[str] | None = None, *, like: Like | None = None) -> Snapshot:
        """Read and hash each file once; see `CheckpointIO.load`."""
        files, path = self._at(path)
        return Reader(files, path).snapshot(groups, like)

    def exists(self, path: str) -> bool:
        """Return whether `path` is a directory with a manifest; see `CheckpointIO.exists`."""
        files, path = self._at(path)
        with os_errors("look into", path):
            return files.kind(files.join(path, MANIFEST)) == "file"

    def list(self, directory: str) -> Names:
        """List directories with a manifest, but no hidden, linked or set-aside ones; see `CheckpointIO`."""
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
        """Rename, then delete, so that a kill leaves no partial checkpoint; see `CheckpointIO.remove`."""
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
                # Otherwise a power cut could undo the renaming, but not the deletions that follow.
                files.sync(parent)
            else:
                write_file(files.join(path, UNFINISHED), [], files)
            discard(doomed, files)
            files.sync(parent)

    def _at(self, path: str) -> tuple[FileSystem, str]:
        files = file_system(path) if self._files is None else self._files
        return files, files.absolute(path)


class UnfinishedCheckpoint:
    """The directory of a checkpoint that is being written: each process writes its share, one the manifest.

    Args:
        final: The path after the commit, for messages.

    Attributes:
        is_committed: Whether the checkpoint is committed; then it must not be deleted.
    """

    def __init__(self, files: FileSystem, directory: str, final: str) -> None:
        self.files = files
        self.directory = directory
        self.final = final
        self.is_committed = False
        self._open: list[tuple[str, Sink]] = []
        self._held: dict[str, FileRecord] = {}

    def write_share(self, plan: SavePlan, rank: int, own: Collection[str] = ()) -> dict[str, FileRecord]:
        """Write this process's part of every tensor, one file per group.

        Several processes write the hashes of their pieces to a file next to each tensor file: together they
        are too many for a manifest that every process reads. A single process returns its hashes for the
        manifest.

        Args:
            own: The groups that belong to an object. The first process writes them, and keeps small ones for
                the manifest, which it writes too.
        """
        written: dict[str, FileRecord] = {}
        with self._closing():
            for group, tensors in plan.parts.items():
                check_part_name(group, "a group of tensors")
                if not tensors:
                    continue
                file = file_name(group, rank, plan.processes)
                hashes = Hashes()
                chunks: Iterable[Bytes] = tensor_chunks(tensors, f"the group {group!r}", hashes)
                if group in own and sum(each.nbytes for each in tensors.values()) <= SMALL:
                    content = b"".join(chunks)
                    if len(content) <= SMALL:
                        self._held[file] = FileRecord(len(content), hashes=hashes, content=content)
                        continue
                    chunks = [content]
                size = self._write(file, chunks)
                if plan.processes == 1:
                    written[file] = FileRecord(size, hashes=hashes)
                    continue
                data = dump_json(dump_hashes(hashes), f"the hashes of {file}")
                self._write(hashes_name(file), [data])
                written[file] = FileRecord(size, xxhash.xxh3_128_hexdigest(data))
            if plan.processes > 1:  # the first process finishes only its own files
                self._finish()
        return written

    def _write(self, file: str, chunks: Iterable[Bytes]) -> int:
        """Write a file, which `_finish` makes durable.

        Written first and synced afterwards, the files of a checkpoint share a commit of the disk's journal.
        If each is synced before the next is written, each waits for a commit.
        """
        with os_errors("write", self.files.join(self.final, file)):
            sink = self.files.create(self.files.join(self.directory, file))
            self._open.append((file, sink))
            size = write_chunks(sink, chunks)
        # An object store would hold them in memory until then, and gains nothing.
        if not self.files.renames or len(self._open) >= _TOGETHER:
            self._finish()
        return size

    def _finish(self) -> None:
        while self._open:
            file, sink = self._open.pop(0)
            with os_errors("write", self.files.join(self.final, file)):
                sink.finish()

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Run the block; on an error close the files that are not finished, before anyone deletes them."""
        try:
            yield
        except BaseException:
            while self._open:
                with suppress(OSError):  # the first error is already propagating
                    self._open.pop()[1].abort()
            raise

    def _write_assets(self, assets: Mapping[str, bytes], folders: Iterable[str]) -> dict[str, FileRecord]:
        for folder in folders:
            with os_errors("create", self.files.join(self.final, folder)):
                self.files.make_directory(self.files.join(self.directory, folder))
        records = {}
        for name, content in assets.items():
            size = self._write(f"{ASSETS}/{name}", [content])
            records[name] = FileRecord(size, xxhash.xxh3_128_hexdigest(content))
        return records

    def write_rest(self, shares: list[dict[str, FileRecord]], plan: SavePlan, snapshot: Snapshot) -> None:
        """Write everything except tensors, and the manifest last."""
        written = {file: record for share in shares for file, record in share.items()} | self._held
        objects, assets = dict(snapshot.objects), snapshot.assets
        folders = sorted(
            {str(each) for name in assets for each in PurePosixPath(ASSETS, name).parents} - {"."}
        )
        with self._closing():
            if assets:
                objects[ASSETS] = dump_assets(self._write_assets(assets, folders))
            for name, value in objects.items():
                file = f"{check_part_name(name, 'an object')}.json"
                data = dump_json(value, f"the object {name!r}")
                held = data if len(data) <= SMALL else None
                size = self._write(file, [data]) if held is None else len(data)
                written[file] = FileRecord(size, xxhash.xxh3_128_hexdigest(data), content=held)
            manifest = Manifest(
                written, plan.records, snapshot.progress, snapshot.metrics, processes=plan.processes
            )
            manifest.saved_by["task"] = snapshot.task
            # Last, because in an object store it is the commit.
            self._write(MANIFEST, [manifest.dump()])
            self._finish()
        for folder in [*folders, ""]:
            with os_errors("write", self.files.join(self.final, folder or MANIFEST)):
                self.files.sync(self.files.join(self.directory, folder) if folder else self.directory)


def read_manifest(path: str) -> Manifest:
    """Read and verify the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: There is no checkpoint, or a damaged one.
        CheckpointError: The format is newer, or there is no permission.
    """
    return open_checkpoint(path).manifest


def verify(path: str) -> Manifest:
    """Check every byte of a checkpoint, in constant memory.

    Returns:
        Its manifest.

    Raises:
        DamagedCheckpointError: A file is damaged; names it and the fault.
        CheckpointError: The format is newer, or there is no permission.
    """
    reader = open_checkpoint(path)
    reader.verify()
    return reader.manifest


def discard(directory: str, files: FileSystem) -> None:
    """Delete an unfinished or unwanted checkpoint; after a kill the rest is still recognised as such."""
    if not files.renames:
        # The manifest first, so that no partial checkpoint counts; the marker last, so that the rest has it.
        for name in sorted(files.entries(directory), key=lambda name: name != MANIFEST):
            if name != UNFINISHED:
                files.delete(files.join(directory, name))
    files.delete(directory)


def is_set_aside(name: str) -> bool:
    """Return whether a name is that of a checkpoint set aside as damaged."""
    return _BAD.search(name) is not None


def free_bad_name(path: str, files: FileSystem) -> str:
    """Return the name for setting `path` aside, with the first free suffix of ``.bad``, ``.bad-2``..."""
    candidates = chain([f"{path}.bad"], (f"{path}.bad-{number}" for number in count(2)))
    return next(each for each in candidates if files.kind(each) is None)


def _begin(files: FileSystem, path: str) -> str:
    """Create the directory for writing a new checkpoint, and return it."""
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
            "'.bad-2'...) are reserved for unfinished and damaged checkpoints"
        )
    if files.kind(path) is not None:
        is_checkpoint = files.kind(files.join(path, MANIFEST)) is not None
        kind = "a checkpoint" if is_checkpoint else "something that is not a checkpoint"
        raise CheckpointError(
            f"cannot save to {path!r}: {kind} is there already, and nothing is ever overwritten. "
            "Choose another name"
        )


def _commit(
    written: UnfinishedCheckpoint, shares: list[dict[str, FileRecord]], plan: SavePlan, snapshot: Snapshot
) -> None:
    written.write_rest(shares, plan, snapshot)
    files = written.files
    if not files.renames:
        # The manifest has committed it. With a manifest, a remaining marker means nothing.
        written.is_committed = True
        delete_if_there(files.join(written.directory, UNFINISHED), files)
        return
    with os_errors("commit", written.final):
        files.rename(written.directory, written.final)
        written.is_committed = True
        files.sync(files.split(written.final)[0])
