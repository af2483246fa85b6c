"""Which checkpoints there are, and what is known of each without reading it; nothing on the disk is changed.

The index tells order and purpose, as it does for the run itself; the disk tells what exists. A directory of a
thousand checkpoints is listed in a fraction of a second: all that is looked at in each are the names, sizes
and times of its files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from drivetrain.checkpoint.files import REMOVING, SAVING
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, os_errors, plain_path
from drivetrain.checkpoint.format import MANIFEST
from drivetrain.checkpoint.index import Entry, entry_from_snapshot, read_index
from drivetrain.checkpoint.io import UNFINISHED, DirectoryCheckpointIO, is_set_aside
from drivetrain.checkpoint.locate import CHECKPOINTS
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.reading import Reader
from drivetrain.errors import CheckpointError

Condition: TypeAlias = Literal["committed", "damaged", "unreadable", "gone", "set aside", "unfinished"]
"""The state of a checkpoint, as told without reading its tensors: "committed" does not mean undamaged."""

_TRIES = 5
"""How often a directory is looked at anew because a run has changed it meanwhile."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint, or what is left of one, in a list.

    Attributes:
        name: The name of its directory.
        path: Where it is, relative if the listed path was.
        condition: What is known of it.
        entry: What the index, or else the checkpoint itself, says of it; None where neither can.
        bytes: The size of its files without the manifest; None where it is not known.
        saved_at: When its manifest was written, in seconds since 1970; None where the storage does not tell.
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
        directory: Which was listed: of a run directory, the one inside.
        checkpoints: The newest last; first what has no order, such as what was set aside.
        trouble: What is wrong with the index, or "".
    """

    directory: str
    checkpoints: tuple[Listed, ...]
    trouble: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.checkpoints or self.trouble)


def list_checkpoints(path: str | os.PathLike[str]) -> Listing:
    """List the checkpoints of a run directory or of a directory of checkpoints; or the only one.

    Nothing is changed. Tensors are not read: damage inside of the files is found by `verify`. Of an object
    store, which tells no times, the manifests are read for their sizes.

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
            what = "is a file, no directory of checkpoints" if kind else "does not exist"
            raise CheckpointError(f"{path!r} {what}. Give a run directory, or one of checkpoints")
        inner = files.join(path, CHECKPOINTS)
        directory = inner if files.entries(inner) else path
    index = _read_index(files, directory)
    for _ in range(_TRIES):
        listing = _scan(files, directory, *index)
        now = _read_index(files, directory)
        if now == index:
            return listing
        index = now
    return _scan(files, directory, *index)


def _read_index(files: FileSystem, directory: str) -> tuple[dict[str, Entry], str]:
    try:
        return {entry.name: entry for entry in read_index(directory, files) or []}, ""
    except DamagedCheckpointError as error:
        return {}, str(error)


def _scan(files: FileSystem, directory: str, entries: Mapping[str, Entry], trouble: str) -> Listing:
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
    order = (listed.entry.order, listed.entry.update) if listed.entry else (-1, 0)
    return *order, listed.name


def _look(files: FileSystem, path: str, name: str, entry: Entry | None) -> Listed | None:
    """What is known of one directory; None if it is no checkpoint, or is not there any more."""
    listed = Listed(name, path, "committed", entry)
    if name.startswith(SAVING):
        return replace(listed, condition="unfinished", trouble="is being saved, or its saving was cut short")
    if name.startswith(REMOVING):
        return replace(listed, condition="unfinished", trouble="is being removed, or that was cut short")
    if name.startswith("."):
        return None
    try:
        with os_errors("read", path):
            inside = _inside(files, path)
    except CheckpointError as error:
        return replace(listed, condition="unreadable", trouble=str(error))
    if files.renames:
        size = sum(each[0] for file, each in inside.items() if file != MANIFEST)
        saved_at = inside[MANIFEST][1] if MANIFEST in inside else None
        listed = replace(listed, bytes=size, saved_at=saved_at)
    # Where directories cannot be renamed, the manifest was.
    marks = [file for file in inside if file.startswith(MANIFEST) and is_set_aside(file)]
    if is_set_aside(name) or (marks and MANIFEST not in inside):
        return replace(listed, condition="set aside", trouble="was set aside as damaged")
    if MANIFEST not in inside:
        if UNFINISHED in inside:
            return replace(listed, condition="unfinished", trouble="is being saved, or that was cut short")
        if entry is not None and inside:
            return replace(listed, condition="damaged", trouble=f"has lost its {MANIFEST}")
        return None if entry is None else replace(listed, condition="gone", trouble="is empty")
    return _told_by_itself(files, listed)


def _inside(files: FileSystem, path: str) -> dict[str, tuple[int, float]]:
    """The regular files of a checkpoint, their sizes and times; an object store tells the names alone."""
    if not files.renames:
        return {name: (0, 0.0) for name, kind in files.entries(path).items() if kind == "file"}
    # One look at each file: through `FileSystem`, which has no need of times, each would have to be opened.
    inside: dict[str, tuple[int, float]] = {}
    try:
        with os.scandir(plain_path(path)) as found:
            for each in found:
                if each.is_file(follow_symlinks=False):
                    status = each.stat(follow_symlinks=False)
                    inside[each.name] = (status.st_size, status.st_mtime)
    except FileNotFoundError:  # removed just now
        return {}
    return inside


def _told_by_itself(files: FileSystem, listed: Listed) -> Listed | None:
    """Add what only the checkpoint's own files tell: its entry, and in an object store its size."""
    io = DirectoryCheckpointIO(files)
    try:
        if not files.renames:
            records = Reader(files, files.absolute(listed.path)).manifest.files.values()
            listed = replace(listed, bytes=sum(record.bytes for record in records))
        if listed.entry is None:
            listed = replace(listed, entry=entry_from_snapshot(listed.name, io.load(listed.path, groups=())))
    except CheckpointError as error:
        if listed.entry is None and not io.exists(listed.path):  # removed just now
            return None
        is_damaged = isinstance(error, DamagedCheckpointError)
        return replace(listed, condition="damaged" if is_damaged else "unreadable", trouble=str(error))
    return listed
