"""The checkpoints of a run directory, and the one that a user's path or word refers to."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from drivetrain.checkpoint.format.manifest import MANIFEST, Snapshot
from drivetrain.checkpoint.saving.config import CheckpointConfig, rankings
from drivetrain.checkpoint.saving.index import (
    Entry,
    entry_from_snapshot,
    oldest_first,
    rank,
    read_index,
    read_undamaged_index,
)
from drivetrain.checkpoint.saving.io import CheckpointIO, DirectoryCheckpointIO, verify
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError, ConfigError, nearest
from drivetrain.core.files import odd_kind
from drivetrain.core.messages import logger

_LOG = logger(__name__)

CHECKPOINTS = "checkpoints"
"""The directory of checkpoints inside a run directory."""


class RunDirectory:
    """A run directory that is only read: another process may be training there.

    Args:
        root: A run directory or a directory of checkpoints; also an address such as "s3://bucket/run".
        policies: Those of the program; by default the index tells which metrics rank.

    Raises:
        CheckpointError: The path is empty, or that of a pipe or another file that is no directory.
    """

    def __init__(self, root: str | os.PathLike[str], policies: Sequence[CheckpointConfig] = ()) -> None:
        self.root = os.fspath(root)
        if not self.root:
            raise CheckpointError("the path of a checkpoint or a run directory is empty")
        self.files = file_system(self.root)
        self.directory = self.files.join(self.root, CHECKPOINTS)
        self.policies = policies
        odd = odd_kind(self.files.absolute(self.root)) if self.files.renames else None
        if odd is not None:
            raise CheckpointError(f"no checkpoint at {self.root!r}: it {odd}. A checkpoint is a directory")

    def named(self, text: str) -> str:
        """Return the path of the checkpoint that a word means: "last", "best", or "best:<metric>"."""
        word, _, by = text.partition(":")
        return self.best(by) if word == "best" else self.newest()[0]

    def newest(self, read: Callable[[str], Any] = verify) -> tuple[str, Any]:
        """Return the newest good checkpoint, and the result of `read`; skip damaged ones with a warning.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            CheckpointError: There is no checkpoint; names the paths searched, and similar paths.
        """
        damaged: list[str] = []
        for directory in (self.directory, self.root):
            names = newest_first(directory)
            for name in names:
                candidate = self.files.join(directory, name)
                try:
                    found = read(candidate)
                except DamagedCheckpointError as error:
                    damaged.append(str(error))
                    _LOG.warning(f"the checkpoint {candidate!r} is damaged and skipped: {error}")
                else:
                    _warn_of_lost(directory, self.files, name, names)
                    return candidate, found
        if damaged:
            raise DamagedCheckpointError(f"{self.root!r} has only damaged checkpoints: {'; '.join(damaged)}")
        raise CheckpointError(
            f"no checkpoint found at {self.root!r}. Looked for {MANIFEST} in it, and for checkpoints in it"
            f" and in its {CHECKPOINTS!r}.{near(self.root, self.files)}"
        )

    def best(self, by: str = "") -> str:
        """Return the path of the best checkpoint by a metric, or by the only one that ranks if none is named.

        The metrics that rank are those of the policies. With the default policy they come from the index,
        because the run may have had named loaders, or other policies.

        Raises:
            ConfigError: Several metrics rank and none is named, or the named one does not; lists them.
            CheckpointError: No checkpoint has a value of the metric.
        """
        entries = read_index(self.directory, self.files) or []
        recorded = {name: mode for each in entries for name, mode in each.best.items()}
        asked = {
            name: recorded.get(name, "") if each.mode == "auto" else each.mode
            for name, each in rankings(self.policies).items()
        }
        modes = recorded | asked
        if by:
            _check_ranks(by, modes)
        elif len(asked or recorded) > 1:
            choices = [f"'best:{name}'" for name in asked or recorded]
            raise ConfigError(
                f"checkpoint='best' could mean several: this run ranks by {len(choices)} metrics. Give one of"
                f" {', '.join(choices)}"
            )
        by = by or next(iter(asked or recorded), "")
        ranked = rank(entries, by, modes.get(by, ""))
        if not ranked:
            what = f"a value of {by!r}" if by else "a value that ranks"
            raise CheckpointError(
                f"{self.root} has no best checkpoint: no evaluation gave {what}. Use checkpoint='last', or a"
                " path"
            )
        return self.files.join(self.directory, ranked[0].name)


def _check_ranks(by: str, modes: Collection[str]) -> None:
    if modes and by not in modes:
        raise ConfigError(
            f"checkpoint='best:{by}': no checkpoint is ranked by {by!r}."
            f" {nearest(f'best:{by}', [f'best:{name}' for name in modes])}"
        )


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the path of the checkpoint to load.

    Nothing on the disk changes: another process may be training there.

    Args:
        path: A checkpoint, a run directory, or a directory of checkpoints; also an address such as
            "s3://bucket/run". A directory stands for its newest good checkpoint; damaged ones are skipped
            with a warning.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        CheckpointError: There is no checkpoint; names the paths searched, and similar paths.
    """
    run = RunDirectory(path)
    return run.root if DirectoryCheckpointIO().exists(run.root) else run.newest()[0]


def load_newest(path: str | os.PathLike[str], groups: Collection[str]) -> tuple[str, Snapshot]:
    """Load some groups of the checkpoint that `resolve` would return; each byte is read and verified once."""
    run, io = RunDirectory(path), DirectoryCheckpointIO()

    def load(candidate: str) -> Snapshot:
        return io.load(candidate, groups=tuple(groups))

    return (run.root, load(run.root)) if io.exists(run.root) else run.newest(load)


def _warn_of_lost(directory: str, files: FileSystem, chosen: str, present: list[str]) -> None:
    """Warn of missing checkpoints that are newer than the chosen one by the index."""
    listed = [
        each.name for each in read_undamaged_index(directory, files)[0]
    ]  # another process may have pruned
    newer = listed[listed.index(chosen) + 1 :] if chosen in listed else []
    io = DirectoryCheckpointIO(files)
    lost = [each for each in newer if each not in present and not io.exists(files.join(directory, each))]
    if lost:
        _LOG.warning(
            f"the index of {directory!r} has newer checkpoints than {chosen}, but they were removed or"
            f" have lost their {MANIFEST}: {', '.join(sorted(lost))}. {chosen} is used"
        )


def newest_first(directory: str) -> list[str]:
    """Return the names of a directory's checkpoints, ordered by the index, or else by their own entries."""
    files = file_system(directory)
    io = DirectoryCheckpointIO()
    present = io.list(directory)
    listed = read_undamaged_index(directory, files)[0] if present else []
    entries, damaged = entries_of(directory, present, listed, io, files)
    # A damaged one is reported only if no good one comes before it.
    return [*(each.name for each in reversed(entries)), *damaged]


def entries_of(
    directory: str, present: Collection[str], listed: Sequence[Entry], io: CheckpointIO, files: FileSystem
) -> tuple[list[Entry], dict[str, DamagedCheckpointError]]:
    """Return the entries of the checkpoints that exist, oldest first, by the index or else by their own.

    A checkpoint that the index lacks was committed just before a kill, or the index was lost. If it is
    damaged, it comes by its name, with what is wrong.
    """
    entries = [each for each in listed if each.name in present]
    damaged = {}
    for name in sorted({*present} - {each.name for each in listed}):
        try:
            entries.append(entry_from_snapshot(name, io.load(files.join(directory, name), groups=())))
        except DamagedCheckpointError as error:
            damaged[name] = error
    return oldest_first(entries), damaged


def near(path: str, files: FileSystem) -> str:
    """Return a sentence with the names beside a path that are like its own; empty if none is."""
    parent, last = files.split(files.absolute(path))
    with os_errors("list", parent):
        found = difflib.get_close_matches(last, sorted(files.entries(parent)), n=3, cutoff=0.3)
    return f" Near it are: {', '.join(repr(files.join(parent, name)) for name in found)}." if found else ""
