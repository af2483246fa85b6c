"""From the path that a user gives to the checkpoint that is meant."""

from __future__ import annotations

import difflib
import os
import warnings

from drivetrain.checkpoint.files import DamagedCheckpointError
from drivetrain.checkpoint.format import MANIFEST
from drivetrain.checkpoint.index import entry_from_snapshot, read_index
from drivetrain.checkpoint.io import LocalCheckpointIO, verify
from drivetrain.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""The directory of checkpoints inside a run directory."""


def resolve(path: str | os.PathLike[str]) -> str:
    """The checkpoint to load.

    Nothing on the disk is changed: another process may be training there.

    Args:
        path: A checkpoint, a run directory, or a directory of checkpoints; for the latter two the newest good
            one is taken, and damaged ones are passed over with a warning.

    Raises:
        DamagedCheckpointError: There are checkpoints, and all are damaged.
        CheckpointError: There is none; says where it was looked for, and what is near.
    """
    io = LocalCheckpointIO()
    path = os.fspath(path)
    if io.exists(path):
        return path
    damaged: list[str] = []
    for directory in (os.path.join(path, CHECKPOINTS), path):
        for name in _newest_first(directory, io):
            candidate = os.path.join(directory, name)
            try:
                verify(candidate)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
                warnings.warn(
                    f"the checkpoint {candidate!r} is damaged and passed over: {error}", stacklevel=2
                )
                continue
            return candidate
    if damaged:
        raise DamagedCheckpointError(
            f"{path!r} has no good checkpoint, only damaged ones: {'; '.join(damaged)}"
        )
    raise CheckpointError(
        f"no checkpoint found at {path!r}. Looked for {MANIFEST} in it, and for checkpoints in it and in its "
        f"{CHECKPOINTS!r}.{_near(path, io)}"
    )


def _newest_first(directory: str, io: LocalCheckpointIO) -> list[str]:
    """A directory's checkpoints, ordered by the index where it knows them, else by their own words."""
    present = set(io.list(directory))
    if not present:
        return []
    try:
        entries = {entry.name: entry for entry in read_index(directory) or []}
    except DamagedCheckpointError:
        entries = {}  # the manager repairs it when the run goes on
    keys: dict[str, tuple[int, int]] = {}
    for name in sorted(present):
        try:
            entry = entries.get(name) or entry_from_snapshot(
                name, io.load(os.path.join(directory, name), groups=())
            )
            keys[name] = (entry.order, entry.update)
        except DamagedCheckpointError:
            keys[name] = (0, 0)  # met again, and reported, only if no good one comes before it
    return sorted(keys, key=lambda name: keys[name], reverse=True)


def _near(path: str, io: LocalCheckpointIO) -> str:
    path = os.path.abspath(path)
    parent = os.path.dirname(path)
    if io.exists(parent):
        return f" Did you mean the checkpoint that it is in, {parent!r}?"
    if not os.path.isdir(parent):
        return f" There is no directory {parent!r} either."
    names = [
        name
        for name in sorted(os.listdir(parent))
        if io.exists(os.path.join(parent, name)) or os.path.isdir(os.path.join(parent, name, CHECKPOINTS))
    ]
    near = difflib.get_close_matches(os.path.basename(path), names, n=3, cutoff=0.3) or names[-3:]
    return f" Near it are: {', '.join(repr(os.path.join(parent, name)) for name in near)}." if near else ""
