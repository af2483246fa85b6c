"""List checkpoints and their state without reading them; nothing on the disk changes.

As for the run itself, the index has the order and purpose of each checkpoint, and the disk decides which
exist. A directory of a thousand checkpoints is listed in a fraction of a second, because only the names,
sizes and times of files are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.saving.index import Entry, entry_from_snapshot, read_undamaged_index
from drivetrain.checkpoint.saving.io import UNFINISHED, DirectoryCheckpointIO, is_set_aside
from drivetrain.checkpoint.saving.reading import Reader
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS
from drivetrain.checkpoint.storage.filesystem import (
    REMOVING,
    SAVING,
    DamagedCheckpointError,
    FileSystem,
    os_errors,
)
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError

Condition: TypeAlias = Literal["committed", "damaged", "unreadable", "gone", "set aside", "unfinished"]
"""The state of a checkpoint without reading its tensors; a "committed" one may be damaged."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A listed checkpoint, or the remains of one.

    Attributes:
        name: The name of its directory.
        path: Its path, relative if the listed path was.
        condition: Its state.
        entry: Its entry in the index, or else in the checkpoint itself; None if neither has one.
        bytes: The size of its files; None if unknown.
        saved_at: The time when its manifest was written, in seconds since 1970; None if unknown.
        trouble: What is wrong with it, or "".
    """

    name: str
    path: str
    condition: Condition
    entry: Entry | None = None
    bytes: int | None = None
    saved_at: float | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory of checkpoints.

    Attributes:
        directory: The listed directory; for a run directory, the one inside.
        checkpoints: The checkpoints, newest last. Checkpoints without an order, such as set-aside ones, come
            first.
        trouble: What is wrong with the index, or "".
    """

    directory: str
    checkpoints: tuple[Listed, ...]
    trouble: str = ""

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.trouble)


def list_checkpoints(path: str | os.PathLike[str]) -> Listing:
    """List the checkpoints of a run directory or of a directory of checkpoints; or a single checkpoint.

    Nothing is changed, and no tensor is read: `verify` finds damage inside the files. In an object store,
    sizes come from the manifests, and times are unknown.

    Args:
        path: The directory, or one checkpoint; also an address such as "s3://bucket/run".

    Raises:
        CheckpointError: There is no such directory, or it cannot be read.
    """
    path = os.fspath(path)
    files = file_system(path)
    if DirectoryCheckpointIO(files).exists(path):
        only = _look(files, path, files.split(files.absolute(path))[1], None)
        return Listing(path, () if only is None else (only,))
    with os_errors("list", path):
        kind = files.kind(path)
        if kind == "file" or (kind is None and not files.entries(path)):
            what = "is a file, not a directory of checkpoints" if kind else "does not exist"
            raise CheckpointError(f"{path!r} {what}. Give a run directory, or one of checkpoints")
        inner = files.join(path, CHECKPOINTS)
        directory = inner if files.entries(inner) else path
    return _scan(files, directory, *read_undamaged_index(directory, files))


def _scan(files: FileSystem, directory: str, index: Sequence[Entry], trouble: str) -> Listing:
    entries = {entry.name: entry for entry in index}
    with os_errors("list", directory):
        names = files.entries(directory)
    found = [
        _look(files, files.join(directory, name), name, entries.get(name))
        for name, kind in names.items()
        if kind == "directory"
    ]
    lost = [
        Listed(name, files.join(directory, name), "gone", entry, trouble="is in the index, but is not there")
        for name, entry in entries.items()
        if names.get(name) != "directory"
    ]
    listed = sorted([*(each for each in found if each is not None), *lost], key=_age)
    return Listing(directory, tuple(listed), trouble)


def _age(listed: Listed) -> tuple[int, int, str]:
    order = (listed.entry.order, listed.entry.step) if listed.entry else (-1, 0)
    return *order, listed.name


def _look(files: FileSystem, path: str, name: str, entry: Entry | None) -> Listed | None:
    """Return the listing of one directory; None if it is not a checkpoint, or has been removed."""
    listed = Listed(name, path, "committed", entry)
    saving = replace(listed, condition="unfinished", trouble="is being saved, or its save was interrupted")
    if name.startswith((SAVING, REMOVING)):
        removing = replace(saving, trouble="is being removed, or its removal was interrupted")
        return saving if name.startswith(SAVING) else removing
    if name.startswith("."):
        return None
    try:
        with os_errors("read", path):
            inside = [each for each, kind in files.entries(path).items() if kind == "file"]
    except CheckpointError as error:
        return replace(listed, condition="unreadable", trouble=str(error))
    if is_set_aside(name):
        return replace(_sized(files, listed), condition="set aside", trouble="was set aside as damaged")
    if MANIFEST not in inside:
        return _without_manifest(listed, inside, saving.trouble)
    return _described_by_files(files, _sized(files, listed))


def _without_manifest(listed: Listed, inside: Collection[str], unfinished: str) -> Listed | None:
    # Where directories cannot be renamed, the manifest of a damaged one was renamed instead.
    if any(file.startswith(MANIFEST) and is_set_aside(file) for file in inside):
        return replace(listed, condition="set aside", trouble="was set aside as damaged")
    if UNFINISHED in inside:
        return replace(listed, condition="unfinished", trouble=unfinished)
    if listed.entry is not None and inside:
        return replace(listed, condition="damaged", trouble=f"has lost its {MANIFEST}")
    return None if listed.entry is None else replace(listed, condition="gone", trouble="is empty")


def _sized(files: FileSystem, listed: Listed) -> Listed:
    """Add the size of a checkpoint on a disk, which need not be complete, and the time of its manifest."""
    if not files.renames:
        return listed
    size, saved_at, top = 0, None, listed.path
    for parent, _, names in os.walk(top):
        for name in names:
            with suppress(OSError):  # removed just now
                status = os.lstat(os.path.join(parent, name))
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
                saved_at = status.st_mtime if (parent, name) == (top, MANIFEST) else saved_at
    return replace(listed, bytes=size, saved_at=saved_at)


def _described_by_files(files: FileSystem, listed: Listed) -> Listed | None:
    """Add information from the checkpoint's files: its entry, and in an object store its size."""
    io = DirectoryCheckpointIO(files)
    try:
        if not files.renames:
            listed = replace(listed, bytes=Reader(files, files.absolute(listed.path)).size)
        if listed.entry is None:
            listed = replace(listed, entry=entry_from_snapshot(listed.name, io.load(listed.path, groups=())))
    except CheckpointError as error:
        if listed.entry is None and not io.exists(listed.path):  # removed just now
            return None
        is_damaged = isinstance(error, DamagedCheckpointError)
        return replace(listed, condition="damaged" if is_damaged else "unreadable", trouble=str(error))
    return listed
