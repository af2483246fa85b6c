"""Recovery of a directory of checkpoints after a kill or a fault of the disk."""

from __future__ import annotations

import socket
from contextlib import suppress

from drivetrain.checkpoint.format.manifest import MANIFEST, Snapshot
from drivetrain.checkpoint.saving.index import INDEX, Entry, read_index, write_index
from drivetrain.checkpoint.saving.io import UNFINISHED, CheckpointIO, discard, free_bad_name
from drivetrain.checkpoint.saving.reading import Reader
from drivetrain.checkpoint.saving.run_directory import entries_of
from drivetrain.checkpoint.saving.sharding import Like
from drivetrain.checkpoint.storage.filesystem import (
    REMOVING,
    SAVING,
    DamagedCheckpointError,
    FileSystem,
    os_errors,
)
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks


def recover(directory: str, io: CheckpointIO, files: FileSystem) -> tuple[list[Entry], list[str]]:
    """Reconcile the index with the disk, and delete unfinished checkpoints.

    Args:
        directory: The directory of checkpoints and their index; may be missing.

    Returns:
        The entries of the existing checkpoints, oldest first, and a text for each problem found.

    Raises:
        CheckpointError: The directory cannot be read or written, or has a newer format.
    """
    trouble: list[str] = []
    _delete_leftovers(directory, files)
    listed = _listed(directory, files, trouble)
    present = io.list(directory)
    gone = [entry.name for entry in listed if entry.name not in present]
    trouble += [_lost(files.join(directory, name), files) for name in gone]
    entries, damaged = entries_of(directory, present, listed, io, files)
    trouble += [set_aside(files.join(directory, name), error, files)[1] for name, error in damaged.items()]
    if entries != listed:
        write_index(directory, entries, files)
    return entries, trouble


def load_together(
    path: str, like: Like | None, io: CheckpointIO, files: FileSystem, ranks: Ranks
) -> Snapshot | DamagedCheckpointError:
    """Read a checkpoint that rank 0 has listed, on all ranks.

    Returns:
        Its content; or, on all ranks, the damage that one of them found.

    Raises:
        CheckpointError: On all ranks: it has a newer format, is not readable now, or is damaged for one rank
            while rank 0 finds every byte intact.
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
    # Rank 0 finds every byte intact: a good checkpoint must not count as damaged.
    raise CheckpointError(
        f"rank {number} (on {host}) finds {path!r} damaged, and rank 0 finds it intact:"
        f" {error}. All ranks must see the same directory; nothing was renamed"
    )


def _damage(path: str, files: FileSystem) -> DamagedCheckpointError | None:
    """Return a checkpoint's damage as seen by this process, or None."""
    try:
        Reader(files, files.absolute(path)).verify()
    except DamagedCheckpointError as error:
        return error.with_traceback(None)
    return None


def set_aside(path: str, error: DamagedCheckpointError, files: FileSystem) -> tuple[bool, str]:
    """Rename a damaged checkpoint to a name that says so; if directories cannot be renamed, its manifest.

    Returns:
        Whether that succeeded, and a text for the user.
    """
    damaged = path if files.renames else files.join(path, MANIFEST)
    try:
        aside = free_bad_name(damaged, files)
        files.rename(damaged, aside)
    except OSError as failure:
        return False, (
            f"the checkpoint {path!r} is damaged and skipped: {error}. It could not be renamed: {failure}"
        )
    return True, f"the checkpoint {path!r} is damaged and was set aside as {aside!r}: {error}"


def _lost(path: str, files: FileSystem) -> str:
    """Return a warning for a checkpoint that only the index has; set aside what is left of it."""
    with os_errors("read", path):
        gone = files.kind(path) != "directory"
    if gone:
        return f"the checkpoint {path!r} is in the index, but not on the disk; its entry is dropped"
    if not files.renames:
        # Without a manifest there is nothing to rename: the directory no longer counts as a checkpoint.
        return f"the checkpoint {path!r} is damaged and skipped: it has lost its {MANIFEST}"
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
            f"{error}. It was set aside as {aside!r}, and the index is rebuilt from the checkpoints"
        )
        return []


def _delete_leftovers(directory: str, files: FileSystem) -> None:
    """Delete unfinished directories after a kill, recognised by their name or marker."""
    with os_errors("list", directory):
        for name, kind in files.entries(directory).items():
            path = files.join(directory, name)
            inside = files.entries(path) if kind == "directory" and not files.renames else {}
            if name.startswith((SAVING, REMOVING)) or (UNFINISHED in inside and MANIFEST not in inside):
                with suppress(OSError):  # harmless, and the next open tries again
                    discard(path, files)
