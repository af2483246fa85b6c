"""What a kill, or a fault of the disk, has left in a directory of checkpoints, and how it is put in order."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from contextlib import suppress

from drivetrain.checkpoint.config import CheckpointConfig
from drivetrain.checkpoint.files import REMOVING, SAVING
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.format import MANIFEST, Snapshot
from drivetrain.checkpoint.index import (
    INDEX,
    Entry,
    entry_from_snapshot,
    oldest_first,
    rank,
    read_index,
    write_index,
)
from drivetrain.checkpoint.io import UNFINISHED, CheckpointIO, discard, free_bad_name
from drivetrain.checkpoint.reading import Reader
from drivetrain.checkpoint.sharding import Like
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import CheckpointError


def recover(directory: str, io: CheckpointIO, files: FileSystem) -> tuple[list[Entry], list[str]]:
    """Reconcile the index with the disk, and delete what was never finished.

    Args:
        directory: Of checkpoints and their index; need not exist.
        io: The storage.
        files: The file system of the directory.

    Returns:
        The entries of the checkpoints that are there, oldest first, and a text for each thing that was not as
        it should be.

    Raises:
        CheckpointError: The directory cannot be read or written, or is of a newer format.
    """
    trouble: list[str] = []
    _delete_leftovers(directory, files)
    listed = _listed(directory, files, trouble)
    present = set(io.list(directory))
    entries = [entry for entry in listed if entry.name in present]
    for entry in listed:
        if entry.name not in present:
            trouble.append(_lost(files.join(directory, entry.name), files))
    for name in sorted(present - {entry.name for entry in listed}):
        # Committed just before a kill, or its index was lost.
        try:
            entries.append(entry_from_snapshot(name, io.load(files.join(directory, name), groups=())))
        except DamagedCheckpointError as error:
            trouble.append(set_aside(files.join(directory, name), error, files)[1])
    entries = oldest_first(entries)
    if entries != listed:
        write_index(directory, entries, files)
    return entries, trouble


def load_together(
    path: str, like: Like | None, io: CheckpointIO, files: FileSystem, ranks: Ranks
) -> Snapshot | DamagedCheckpointError:
    """Read a checkpoint that rank 0 has listed, in all processes.

    Args:
        path: The checkpoint.
        like: As in `CheckpointIO.load`.
        io: The storage.
        files: The file system of the checkpoint.
        ranks: The processes.

    Returns:
        Its content; on all ranks what is wrong with it if one of them found it damaged.

    Raises:
        CheckpointError: It is of a newer format, not readable now, or damaged for one of the processes though
            rank 0 finds every byte of it good; on all ranks.
    """
    loaded: list[Snapshot] = []

    def load() -> tuple[str, DamagedCheckpointError | None]:
        try:
            loaded.append(io.load(path) if like is None else io.load(path, like=like))
        except DamagedCheckpointError as error:
            return socket.gethostname(), error.with_traceback(None)
        return "", None

    outcomes = ranks.together(load)
    found = [(number, host, error) for number, (host, error) in enumerate(outcomes) if error is not None]
    if not found:
        return loaded[0]
    number, host, error = found[0]
    damage = error if number == 0 else ranks.first(lambda: _damage(path, files))
    if damage is not None:
        return damage
    # Rank 0 finds every byte as it was written: a good checkpoint must not be taken for a damaged one.
    raise CheckpointError(
        f"rank {number} (on {host}) does not see {path!r} as rank 0 does, which finds nothing wrong with it:"
        f" {error}. All ranks must see the same directory; nothing was renamed"
    )


def _damage(path: str, files: FileSystem) -> DamagedCheckpointError | None:
    """What is wrong with a checkpoint as this process sees it; None if nothing is."""
    try:
        Reader(files, files.absolute(path)).verify()
    except DamagedCheckpointError as error:
        return error.with_traceback(None)
    return None


def set_aside(path: str, error: DamagedCheckpointError, files: FileSystem) -> tuple[bool, str]:
    """Give a damaged checkpoint a name that says so; where directories cannot be renamed, its manifest.

    Returns:
        Whether that could be done, and what to tell the user.
    """
    damaged = path if files.renames else files.join(path, MANIFEST)
    try:
        aside = free_bad_name(damaged, files)
        files.rename(damaged, aside)
    except OSError as failure:
        return False, (
            f"the checkpoint {path!r} is damaged and passed over: {error}. It could not be renamed: {failure}"
        )
    return True, f"the checkpoint {path!r} is damaged and was set aside as {aside!r}: {error}"


def removed(directory: str, gone: Collection[str], entries: Sequence[Entry], config: CheckpointConfig) -> str:
    """What to say of checkpoints that somebody has removed while the run went on.

    Args:
        directory: Where they were.
        gone: Their names.
        entries: All that the run knows of, with these.
        config: Says which of them is the best.
    """
    best = {each.name for each in rank(entries, config)[:1]}
    named = ", ".join(f"{each} (the best)" if each in best else each for each in gone)
    left = ", ".join(each.name for each in entries if each.name not in gone)
    return (
        f"checkpoints of this run are not in {directory!r} any more, and it has not removed them itself:"
        f" {named}. Still there: {left or 'none'}. The run goes on, and saves as it would without them"
    )


def _lost(path: str, files: FileSystem) -> str:
    """What to say of a checkpoint that the index knows and the storage does not."""
    with os_errors("read", path):
        gone = files.kind(path) != "directory"
    if gone:
        return f"the checkpoint {path!r} is in the index, but no longer on the disk; it is forgotten"
    if not files.renames:
        # Without a manifest to rename, the directory stays as it is: it is no checkpoint any more.
        return f"the checkpoint {path!r} is damaged and passed over: it has lost its {MANIFEST}"
    return set_aside(path, DamagedCheckpointError(f"it has lost its {MANIFEST}"), files)[1]


def _listed(directory: str, files: FileSystem, trouble: list[str]) -> list[Entry]:
    try:
        return read_index(directory, files) or []
    except DamagedCheckpointError as error:
        path = files.join(directory, INDEX)
        with os_errors("set aside", path):
            aside = free_bad_name(path, files)
            files.rename(path, aside)
        trouble.append(
            f"{error}. It was set aside as {aside!r}, and the index is made anew from the checkpoints"
        )
        return []


def _delete_leftovers(directory: str, files: FileSystem) -> None:
    """Delete what a kill left unfinished; by its name, or its marker, it is nobody's checkpoint."""
    with os_errors("list", directory):
        for name, kind in files.entries(directory).items():
            path = files.join(directory, name)
            if name.startswith((SAVING, REMOVING)) or (
                not files.renames and kind == "directory" and _is_unfinished(path, files)
            ):
                with suppress(OSError):  # it is no harm, and the next open tries again
                    discard(path, files)


def _is_unfinished(path: str, files: FileSystem) -> bool:
    names = files.entries(path)
    return UNFINISHED in names and MANIFEST not in names
