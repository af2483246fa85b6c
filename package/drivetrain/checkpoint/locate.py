"""Find the checkpoint that a user's path refers to."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection
from typing import TypeVar

from drivetrain.checkpoint.format.manifest import MANIFEST, Snapshot
from drivetrain.checkpoint.saving.index import entry_from_snapshot, read_index
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO, verify
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import odd_kind
from drivetrain.core.messages import logger

_LOG = logger(__name__)

T = TypeVar("T")

CHECKPOINTS = "checkpoints"
"""The directory of checkpoints inside a run directory."""


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the path of the checkpoint to load.

    Nothing on the disk changes: another process may be training there.

    Args:
        path: A checkpoint, a run directory, or a directory of checkpoints; also an address such as
            "s3://bucket/run". A directory stands for its newest good checkpoint; damaged ones are skipped
            with a warning.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        CheckpointError: There is no checkpoint; names the places searched, and similar paths.
    """
    path = _given(path)
    if DirectoryCheckpointIO().exists(path):
        return path
    return _newest_good(path, verify)[0]


def load_newest(path: str | os.PathLike[str], groups: Collection[str]) -> tuple[str, Snapshot]:
    """Load some groups of the checkpoint that `resolve` would return; each byte is read and verified once."""
    path = _given(path)
    io = DirectoryCheckpointIO()

    def load(candidate: str) -> Snapshot:
        return io.load(candidate, groups=tuple(groups))

    return (path, load(path)) if io.exists(path) else _newest_good(path, load)


def _given(path: str | os.PathLike[str]) -> str:
    given = os.fspath(path)
    if not given:
        raise CheckpointError("the path of a checkpoint or a run directory is empty")
    files = file_system(given)
    odd = odd_kind(files.absolute(given)) if files.renames else None
    if odd is not None:
        raise CheckpointError(f"no checkpoint at {given!r}: it {odd}. A checkpoint is a directory")
    return given


def _newest_good(path: str, read: Callable[[str], T]) -> tuple[str, T]:
    """Return the newest readable checkpoint in a directory, and the result of `read`."""
    files = file_system(path)
    damaged: list[str] = []
    for directory in (files.join(path, CHECKPOINTS), path):
        names = newest_first(directory)
        for name in names:
            candidate = files.join(directory, name)
            try:
                found = read(candidate)
                _warn_of_lost(directory, files, name, names)
                return candidate, found
            except DamagedCheckpointError as error:
                damaged.append(str(error))
                _LOG.warning(f"the checkpoint {candidate!r} is damaged and skipped: {error}")
    if damaged:
        raise DamagedCheckpointError(
            f"{path!r} has no good checkpoint, only damaged ones: {'; '.join(damaged)}"
        )
    raise CheckpointError(
        f"no checkpoint found at {path!r}. Looked for {MANIFEST} in it, and for checkpoints in it and in its "
        f"{CHECKPOINTS!r}.{_near(path, files)}"
    )


def _warn_of_lost(directory: str, files: FileSystem, chosen: str, present: list[str]) -> None:
    """Warn of missing checkpoints that are newer than the chosen one by the index."""
    try:
        # Read again: another process may have pruned some since.
        entries = {entry.name: entry for entry in read_index(directory, files) or []}
    except DamagedCheckpointError:
        return
    if chosen not in entries:
        return
    lost = [
        name
        for name, entry in entries.items()
        if entry.order > entries[chosen].order
        and name not in present
        and not DirectoryCheckpointIO().exists(files.join(directory, name))
    ]
    if lost:
        _LOG.warning(
            f"{directory!r} lacks {', '.join(sorted(lost))}, newer than {chosen} by its index: removed, or"
            f" without {MANIFEST}. {chosen} is used"
        )


def newest_first(directory: str) -> list[str]:
    """Return the names of a directory's checkpoints, ordered by the index, or else by their own entries."""
    files = file_system(directory)
    io = DirectoryCheckpointIO()
    present = set(io.list(directory))
    if not present:
        return []
    try:
        entries = {entry.name: entry for entry in read_index(directory, files) or []}
    except DamagedCheckpointError:
        entries = {}  # the manager repairs the index when the run resumes
    keys: dict[str, tuple[int, int]] = {}
    for name in sorted(present):
        try:
            entry = entries.get(name) or entry_from_snapshot(
                name, io.load(files.join(directory, name), groups=())
            )
            keys[name] = (entry.order, entry.step)
        except DamagedCheckpointError:
            keys[name] = (0, 0)  # last; reported only if no good one comes before it
    return sorted(keys, key=lambda name: keys[name], reverse=True)


def foreign_hint(names: Collection[str]) -> str:
    """Return advice for a folder that another program has saved, recognised by its files' names; else ""."""
    if any(name.endswith(".distcp") for name in names):
        return (
            " torch.distributed.checkpoint has saved this folder: make one file of it with python -m"
            " torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt, and give that"
        )
    if "zero_to_fp32.py" not in names and not any(name.endswith("_optim_states.pt") for name in names):
        return ""
    return (
        " DeepSpeed has saved this folder: make weights of it with the script in it, python"
        " FOLDER/zero_to_fp32.py FOLDER OUTPUT --safe_serialization, and give OUTPUT"
    )


def _near(path: str, files: FileSystem) -> str:
    io = DirectoryCheckpointIO()
    path = files.absolute(path)
    parent, last = files.split(path)
    if io.exists(parent):
        return f" Did you mean the checkpoint that it is in, {parent!r}?"
    with os_errors("list", parent):
        hint = foreign_hint(files.entries(path)) if files.kind(path) == "directory" else ""
        if hint:
            return hint
        if files.renames and files.kind(parent) != "directory":
            return f" There is no directory {parent!r} either."
        names = [
            name
            for name, kind in sorted(files.entries(parent).items())
            if kind == "directory"
            and (
                io.exists(files.join(parent, name))
                or files.kind(files.join(files.join(parent, name), CHECKPOINTS)) == "directory"
            )
        ]
    near = difflib.get_close_matches(last, names, n=3, cutoff=0.3) or names[-3:]
    return f" Near it are: {', '.join(repr(files.join(parent, name)) for name in near)}." if near else ""
