"""What there is to say of checkpoints without changing them: lists, and what one consists of."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.format import MANIFEST
from drivetrain.checkpoint.index import Entry, entry_from_snapshot, read_index
from drivetrain.checkpoint.io import DirectoryCheckpointIO, is_set_aside
from drivetrain.checkpoint.locate import CHECKPOINTS
from drivetrain.checkpoint.places import file_system
from drivetrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint in a list.

    Attributes:
        path: Where it is.
        entry: What the index, or else the checkpoint itself, says of it; None where nothing can be believed.
        trouble: What is wrong with it, or "".
    """

    path: str
    entry: Entry | None
    trouble: str = ""


def list_checkpoints(path: str) -> list[Listed]:
    """The checkpoints of a run directory or of a directory of checkpoints, oldest first; or the only one.

    Nothing is changed, and no tensor is read: damage inside of the files is found by `verify`. What was set
    aside as damaged comes first.

    Raises:
        CheckpointError: There is no such directory, or it cannot be read.
    """
    files = file_system(path)
    io = DirectoryCheckpointIO(files)
    if io.exists(path):
        return [_from_itself(io, path, files.split(files.absolute(path))[1])]
    inner = files.join(path, CHECKPOINTS)
    with os_errors("list", path):
        if files.renames and files.kind(path) != "directory":
            raise CheckpointError(f"there is no directory {path!r}")
        directory = inner if files.entries(inner) else path
        names = files.entries(directory)
    trouble = ""
    try:
        entries = {entry.name: entry for entry in read_index(directory, files) or []}
    except DamagedCheckpointError as error:
        entries, trouble = {}, str(error)
    aside = [
        Listed(files.join(directory, name), None, "was set aside as damaged")
        for name, kind in sorted(names.items())
        if kind == "directory" and is_set_aside(name)
    ]
    if trouble:
        aside.insert(0, Listed(directory, None, trouble))
    present = set(io.list(directory))
    found = [_listed(files, io, directory, name, entries) for name in sorted(present)]
    found += [
        Listed(files.join(directory, name), entry, f"has lost its {MANIFEST}" if name in names else "is gone")
        for name, entry in entries.items()
        if name not in present
    ]
    return aside + sorted(found, key=_age)


def _age(listed: Listed) -> tuple[int, int]:
    return (listed.entry.order, listed.entry.update) if listed.entry else (0, 0)


def _listed(
    files: FileSystem, io: DirectoryCheckpointIO, directory: str, name: str, entries: dict[str, Entry]
) -> Listed:
    path = files.join(directory, name)
    return Listed(path, entries[name]) if name in entries else _from_itself(io, path, name)


def _from_itself(io: DirectoryCheckpointIO, path: str, name: str) -> Listed:
    try:
        return Listed(path, entry_from_snapshot(name, io.load(path, groups=())))
    except CheckpointError as error:
        return Listed(path, None, str(error))
