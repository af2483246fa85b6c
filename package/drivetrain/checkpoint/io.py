"""How a checkpoint gets to storage and back: the protocol, and its implementation for local directories."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection
from typing import Protocol, TypeAlias

from torch import Tensor

from drivetrain.checkpoint.files import (
    REMOVING,
    SAVING,
    DamagedCheckpointError,
    HashedReader,
    dump_json,
    make_directories,
    os_errors,
    parse_json,
    read_json_bytes,
    sync_directory,
    write_file,
)
from drivetrain.checkpoint.format import (
    MANIFEST,
    FileRecord,
    Manifest,
    Piece,
    Snapshot,
    TensorRecord,
    check_part_name,
)
from drivetrain.checkpoint.tensors import CODES, read_header, read_tensors, tensor_chunks
from drivetrain.errors import CheckpointError, nearest
from drivetrain.types import Json

Names: TypeAlias = list[str]
"""Needed because inside the classes below `list` is a method."""

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
        """Write and commit a new checkpoint; durable on return.

        Raises:
            CheckpointError: Something is there already, or it could not be written; nothing is left behind
                then.
        """
        ...

    def load(self, path: str, groups: Collection[str] | None = None) -> Snapshot:
        """Read a checkpoint, having verified each file that is read.

        Args:
            path: Of a committed checkpoint.
            groups: The groups of tensors to read; None for all. An object with the name of a group is read
                with it, and every other object always: ``("model",)`` gives the weights and "hparams", but no
                "state".

        Raises:
            DamagedCheckpointError: Not there, or not what was written.
            CheckpointError: A group that it does not have, a newer format, or no permission to read.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a committed checkpoint, damaged or not."""
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


class LocalCheckpointIO:
    """Checkpoints in directories of a local or mounted file system."""

    def save(self, path: str, snapshot: Snapshot) -> None:
        """Write beside the final place, sync, the manifest last, then rename; see `CheckpointIO.save`."""
        path = _local(path)
        parent, name = os.path.split(path)
        _check_free(path, name)
        temporary = os.path.join(parent, f"{SAVING}{name}-{secrets.token_hex(4)}")
        try:
            with os_errors("create", temporary):
                make_directories(parent)
                os.mkdir(temporary)
            _write(temporary, path, snapshot)
            with os_errors("commit", path):
                os.rename(temporary, path)
                sync_directory(parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def load(self, path: str, groups: Collection[str] | None = None) -> Snapshot:
        """Read each file once, hashing on the way; see `CheckpointIO.load`."""
        path = _local(path)
        manifest = read_manifest(path)
        wanted = _wanted_groups(manifest, groups, path)
        tensors = {group: _read_group(path, manifest, group) for group in wanted}
        objects = {
            name: _read_object(path, file, manifest.files[file])
            for name, file in manifest.objects().items()
            if name not in manifest.tensors or name in wanted
        }
        return Snapshot(
            tensors, objects, manifest.progress, manifest.metrics, manifest.saved_by.get("task", "")
        )

    def exists(self, path: str) -> bool:
        """Whether `path` is a directory with a manifest; see `CheckpointIO.exists`."""
        path = _local(path)
        try:
            return stat.S_ISREG(os.lstat(os.path.join(path, MANIFEST)).st_mode)
        except OSError:
            return False

    def list(self, directory: str) -> Names:
        """Directories with a manifest, but for hidden, linked and set-aside ones; see `CheckpointIO.list`."""
        directory = _local(directory)
        if not os.path.isdir(directory):
            return []
        with os_errors("list", directory), os.scandir(directory) as entries:
            return [
                entry.name
                for entry in entries
                if not entry.name.startswith(".")
                and not _BAD.search(entry.name)
                and entry.is_dir(follow_symlinks=False)
                and self.exists(entry.path)
            ]

    def remove(self, path: str) -> None:
        """Rename away, then delete, so that a kill half-way leaves no half; see `CheckpointIO.remove`."""
        path = _local(path)
        if os.path.islink(path) or not self.exists(path):
            raise CheckpointError(
                f"{path!r} is not removed: it is no checkpoint (a directory with a {MANIFEST})"
            )
        parent, name = os.path.split(path)
        doomed = os.path.join(parent, f"{REMOVING}{name}-{secrets.token_hex(4)}")
        with os_errors("remove", path):
            os.rename(path, doomed)
            shutil.rmtree(doomed)
            sync_directory(parent)


def read_manifest(path: str) -> Manifest:
    """The verified manifest of a checkpoint in a local directory.

    Also looks for what no checkpoint contains: a file that is missing, or a symbolic link, which could lead
    anywhere. Other files that the manifest does not list are never read, and so do not matter.

    Raises:
        DamagedCheckpointError: No checkpoint, or a damaged one.
        CheckpointError: A newer format, or no permission.
    """
    path = _local(path)
    with os_errors("read", path):
        if not os.path.isdir(path):
            raise DamagedCheckpointError(f"{path!r} is no checkpoint: there is no such directory")
        with os.scandir(path) as entries:
            present = {entry.name: entry.is_symlink() for entry in entries}
    if MANIFEST not in present:
        raise DamagedCheckpointError(
            f"{path!r} is no checkpoint: it has no {MANIFEST}, so its saving never ended"
        )
    for name, is_link in sorted(present.items()):
        if is_link:
            raise DamagedCheckpointError(
                f"{os.path.join(path, name)!r} is a symbolic link; a checkpoint has none"
            )
    manifest_path = os.path.join(path, MANIFEST)
    with HashedReader(manifest_path) as reader:
        return Manifest.parse(read_json_bytes(reader), repr(manifest_path))


def verify(path: str) -> Manifest:
    """Check every byte of a checkpoint in a local directory, in constant memory.

    Returns:
        Its manifest.

    Raises:
        DamagedCheckpointError: Names the file and what is wrong with it.
        CheckpointError: A newer format, or no permission.
    """
    path = _local(path)
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        with HashedReader(os.path.join(path, name)) as reader:
            reader.check_size(record.bytes)
            reader.skip(record.bytes)
            reader.check_hash(record.xxh3_128)
    for group, records in manifest.tensors.items():
        for file in _files_of(records):
            with HashedReader(os.path.join(path, file)) as reader:
                found = {span.name: (span.shape, span.dtype) for span in read_header(reader)}
            _check_contents(os.path.join(path, file), found, records, group)
    return manifest


def free_bad_name(path: str) -> str:
    """Where something damaged is set aside: `path` with the first of ``.bad``, ``.bad-2``... that is free."""
    candidate = f"{path}.bad"
    number = 1
    while os.path.lexists(candidate):
        number += 1
        candidate = f"{path}.bad-{number}"
    return candidate


def _local(path: str) -> str:
    if "://" in path:
        raise CheckpointError(
            f"{path!r} is an address, and only local directories are supported; give a local path"
        )
    return os.path.abspath(path)


def _check_free(path: str, name: str) -> None:
    if name.startswith(".") or _BAD.search(name):
        raise CheckpointError(
            f"a checkpoint cannot be named {name!r}: names that start with '.' or end with '.bad' (or "
            "'.bad-2'...) are reserved for unfinished and damaged ones"
        )
    if os.path.lexists(path):
        kind = (
            "a checkpoint"
            if os.path.lexists(os.path.join(path, MANIFEST))
            else "something that is no checkpoint"
        )
        raise CheckpointError(
            f"cannot save to {path!r}: {kind} is there already, and nothing is ever overwritten. "
            "Choose another name"
        )


def _write(directory: str, final: str, snapshot: Snapshot) -> None:
    """Write all files of a checkpoint, the manifest last; errors name the place where they were to end up."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, dict[str, TensorRecord]] = {}
    for group, contents in snapshot.tensors.items():
        file = f"{check_part_name(group, 'a group of tensors')}.safetensors"
        if contents:
            with os_errors("write", os.path.join(final, file)):
                chunks = tensor_chunks(contents, f"the group {group!r}")
                files[file] = FileRecord(*write_file(os.path.join(directory, file), chunks))
        tensors[group] = {name: _record(file, tensor) for name, tensor in contents.items()}
    for name, value in snapshot.objects.items():
        file = f"{check_part_name(name, 'an object')}.json"
        data = dump_json(value, f"the object {name!r}")
        with os_errors("write", os.path.join(final, file)):
            files[file] = FileRecord(*write_file(os.path.join(directory, file), [data]))
    manifest = Manifest(files, tensors, snapshot.progress, snapshot.metrics)
    manifest.saved_by["task"] = snapshot.task
    with os_errors("write", os.path.join(final, MANIFEST)):
        # The directory first, so that no order of the disk's writes gives a manifest whose files have no
        # names.
        sync_directory(directory)
        write_file(os.path.join(directory, MANIFEST), [manifest.dump()])
        sync_directory(directory)


def _record(file: str, tensor: Tensor) -> TensorRecord:
    shape = tuple(tensor.shape)
    return TensorRecord(shape, CODES[tensor.dtype], (Piece(file, (0,) * len(shape), shape),))


def _wanted_groups(manifest: Manifest, groups: Collection[str] | None, path: str) -> Names:
    for group in groups or ():
        if group not in manifest.tensors:
            raise CheckpointError(
                f"{path!r} has no group of tensors {group!r}. {nearest(group, manifest.tensors)}"
            )
    return [group for group in manifest.tensors if groups is None or group in groups]


def _files_of(records: dict[str, TensorRecord]) -> Names:
    return sorted({piece.file for record in records.values() for piece in record.pieces})


def _read_group(path: str, manifest: Manifest, group: str) -> dict[str, Tensor]:
    records = manifest.tensors[group]
    for name, record in records.items():
        if record.only_piece is None:
            raise CheckpointError(
                f"{path!r}: {name!r} is stored in {len(record.pieces)} parts, which this version cannot join"
            )
    read: dict[str, Tensor] = {}
    for file in _files_of(records):
        expected = manifest.files[file]
        with HashedReader(os.path.join(path, file)) as reader:
            reader.check_size(expected.bytes)
            contents = read_tensors(reader)
            reader.check_hash(expected.xxh3_128)
        found = {name: (tuple(tensor.shape), CODES[tensor.dtype]) for name, tensor in contents.items()}
        _check_contents(os.path.join(path, file), found, records, group)
        read.update(contents)
    return {name: read[name] for name in records}


def _check_contents(
    file: str, found: dict[str, tuple[tuple[int, ...], str]], records: dict[str, TensorRecord], group: str
) -> None:
    """Compare what a file holds with the pieces that the manifest places there."""
    name = os.path.basename(file)
    expected = {
        tensor: (piece.shape, record.dtype)
        for tensor, record in records.items()
        for piece in record.pieces
        if piece.file == name
    }
    for tensor in sorted(found.keys() | expected.keys()):
        if found.get(tensor) != expected.get(tensor):
            raise DamagedCheckpointError(
                f"{file!r}: the tensor {tensor!r} of the group {group!r} is {_describe(found.get(tensor))}, "
                f"but {_describe(expected.get(tensor))} in the manifest"
            )


def _describe(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"


def _read_object(path: str, file: str, record: FileRecord) -> Json:
    with HashedReader(os.path.join(path, file)) as reader:
        reader.check_size(record.bytes)
        data = read_json_bytes(reader)
        reader.check_hash(record.xxh3_128)
    return parse_json(data, repr(os.path.join(path, file)))
