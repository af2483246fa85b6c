"""Which checkpoints a run keeps, and which it resumes from."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from drivetrain.checkpoint.config import CheckpointConfig
from drivetrain.checkpoint.export import export_weights, load_weights
from drivetrain.checkpoint.files import REMOVING, SAVING, DamagedCheckpointError, os_errors, remove_if_there
from drivetrain.checkpoint.format import Snapshot
from drivetrain.checkpoint.index import (
    INDEX,
    PURPOSE,
    Entry,
    entry_from_snapshot,
    rank,
    read_index,
    retain,
    write_index,
)
from drivetrain.checkpoint.io import CheckpointIO, LocalCheckpointIO, free_bad_name
from drivetrain.checkpoint.locate import resolve
from drivetrain.errors import CheckpointError, ConfigError, nearest

__all__ = [
    "CheckpointConfig",
    "CheckpointManager",
    "SavedCheckpoint",
    "export_weights",
    "load_weights",
    "resolve",
]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """What `CheckpointManager.save` committed.

    Attributes:
        path: The checkpoint's directory.
        is_keeper: Whether it is among the best now.
    """

    path: str
    is_keeper: bool


class CheckpointManager:
    """The checkpoints of one run directory: saves, ranks, prunes and recovers them.

    The index file is the truth about order and purpose; the disk is the truth about existence. At the first
    use the two are reconciled, so that a kill at any moment loses at most the checkpoint that was being
    saved. One process at a time may write to a directory.

    Args:
        directory: Where the checkpoints and their index are; created by the first save.
        config: The policy.
        io: The storage.
    """

    def __init__(self, directory: str, config: CheckpointConfig, io: CheckpointIO | None = None) -> None:
        self.directory = directory
        self.config = config
        self.io: CheckpointIO = LocalCheckpointIO() if io is None else io
        self._entries: list[Entry] = []
        self._opened = False
        # Saved or loaded by this manager: only these are known to hold the state that the run has at their
        # update.
        self._ours: set[str] = set()

    def entries(self) -> tuple[Entry, ...]:
        """All checkpoints, oldest first."""
        self._open()
        return tuple(self._entries)

    def best(self) -> str | None:
        """The path of the best keeper, or None while there is none. It has not been verified."""
        self._open()
        ranked = rank(self._entries, self.config)
        return self._path(ranked[0].name) if ranked else None

    def latest(self) -> str | None:
        """The path of the newest good checkpoint, verified; `load_latest` gives its content as well."""
        found = self.load_latest()
        return found[0] if found else None

    def load_latest(self) -> tuple[str, Snapshot] | None:
        """Read the newest good checkpoint.

        A damaged one is renamed to `<name>.bad` with a warning that says what is wrong, and the one before is
        tried.

        Returns:
            Its path and content, or None when there is none at all.

        Raises:
            CheckpointError: The newest is intact as far as can be told, but of a newer format or not readable
                now. An older one is not silently taken in its place.
        """
        self._open()
        for entry in reversed(self._entries):
            path = self._path(entry.name)
            try:
                snapshot = self.io.load(path)
            except DamagedCheckpointError as error:
                self._set_aside(entry.name, error)
                continue
            self._ours.add(entry.name)
            return path, snapshot
        return None

    def should_keep(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be among the best.

        Args:
            metrics: Those of an evaluation that has just ended, by full name.

        Raises:
            ConfigError: The metric that ranks keepers is not among them; lists those that are.
        """
        self._open()
        count = self.config.keepers
        if not count:
            return False
        value = self._ranking_value(metrics)
        ranked = rank(self._entries, self.config)
        if math.isnan(value):
            return False
        if len(ranked) < count:
            return True
        worst = ranked[count - 1].metrics.get(self.config.by or "", math.nan)
        return math.isnan(worst) or self.config.is_better(value, worst)

    def save(
        self,
        update: int,
        epoch: int,
        metrics: Mapping[str, float],
        snapshot_factory: Callable[[], Snapshot],
        *,
        resume: bool = True,
        keeper: bool = False,
    ) -> SavedCheckpoint:
        """Commit a checkpoint, then prune those that are no longer wanted.

        A second save at an update that this manager has just saved, or resumed from, writes nothing: the one
        that is there gets the additional purpose.

        Args:
            update: The number of updates made.
            epoch: The number of epochs made.
            metrics: The latest metrics; that which ranks keepers is put into the index.
            snapshot_factory: Gives the content; called only if something is written.
            resume: Save as a resume point.
            keeper: Save as one of the best, if `should_keep` says so.

        Raises:
            CheckpointError: It could not be written; those before, and the index, are as they were.
            ConfigError: Neither purpose is given, or a keeper's metric is missing.
        """
        if not (resume or keeper):
            raise ConfigError("save() needs a purpose: resume=True, keeper=True, or both")
        self._open()
        # Whether it is good enough is left to the pruning, which ranks it with the others; NaN never is.
        keeper = keeper and self.config.keepers > 0 and not math.isnan(self._ranking_value(metrics))
        by = self.config.by
        ranked = {by: float(metrics[by])} if by is not None and by in metrics else {}
        same = next(
            (each for each in self._entries if each.update == update and each.name in self._ours), None
        )
        if same is None:
            order = max((each.order for each in self._entries), default=0) + 1
            entry = Entry(self._free_name(update), order, update, epoch, ranked, resume, keeper)
            self._write(entry, snapshot_factory())
        else:
            known = ranked if keeper or not same.metrics else same.metrics
            entry = replace(same, metrics=known, resume=same.resume or resume, keeper=same.keeper or keeper)
        self._entries = _sorted([*(each for each in self._entries if each is not same), entry])
        self._prune()
        is_keeper = any(each.name == entry.name and each.keeper for each in self._entries)
        return SavedCheckpoint(self._path(entry.name), is_keeper)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _free_name(self, update: int) -> str:
        # Taken when the run was resumed from an earlier checkpoint than this one, and comes here a second
        # time.
        name = base = f"update-{update:08d}"
        number = 1
        while os.path.lexists(self._path(name)):
            number += 1
            name = f"{base}-{number}"
        return name

    def _ranking_value(self, metrics: Mapping[str, float]) -> float:
        by = self.config.by or ""
        if by not in metrics:
            raise ConfigError(
                f"checkpoints are ranked by the metric {by!r}, which this run does not have. "
                f"{nearest(by, metrics)} Set CheckpointConfig(by=...), or by=None to keep none as the best"
            )
        return float(metrics[by])

    def _write(self, entry: Entry, snapshot: Snapshot) -> None:
        purpose = entry.to_json()
        del purpose["name"]
        self.io.save(
            self._path(entry.name), replace(snapshot, objects={**snapshot.objects, PURPOSE: purpose})
        )
        self._ours.add(entry.name)

    def _prune(self) -> None:
        stays, goes = retain(self._entries, self.config)
        # The index first: a kill in between leaves a checkpoint too many, which the next open finds, never
        # one too few.
        write_index(self.directory, stays)
        self._entries = stays
        for entry in goes:
            try:
                self.io.remove(self._path(entry.name))
            except CheckpointError as error:
                _warn(f"an old checkpoint is still there: {error}")

    def _open(self) -> None:
        if self._opened:
            return
        self._delete_leftovers()
        listed = self._read_index()
        present = set(self.io.list(self.directory))
        self._entries = [entry for entry in listed if entry.name in present]
        for name in sorted(present - {entry.name for entry in listed}):
            self._adopt(name)
        self._entries = _sorted(self._entries)
        if self._entries != listed:
            write_index(self.directory, self._entries)
        self._opened = True
        for entry in listed:
            if entry.name not in present:
                _warn(
                    f"the checkpoint {self._path(entry.name)!r} is in the index, but no longer on the disk; "
                    "it is forgotten"
                )

    def _read_index(self) -> list[Entry]:
        try:
            return read_index(self.directory) or []
        except DamagedCheckpointError as error:
            path = self._path(INDEX)
            aside = free_bad_name(path)
            with os_errors("set aside", path):
                os.rename(path, aside)
            _warn(f"{error}. It was set aside as {aside!r}, and the index is made anew from the checkpoints")
            return []

    def _adopt(self, name: str) -> None:
        """Take in a checkpoint that was committed just before a kill, or whose index was lost."""
        try:
            self._entries.append(entry_from_snapshot(name, self.io.load(self._path(name), groups=())))
        except DamagedCheckpointError as error:
            self._set_aside(name, error)

    def _set_aside(self, name: str, error: DamagedCheckpointError) -> None:
        path = self._path(name)
        aside = free_bad_name(path)
        self._entries = [entry for entry in self._entries if entry.name != name]
        try:
            os.rename(path, aside)
        except OSError as failure:
            _warn(
                f"the checkpoint {path!r} is damaged and passed over: {error}. "
                f"It could not be renamed: {failure}"
            )
            return
        write_index(self.directory, self._entries)
        _warn(f"the checkpoint {path!r} is damaged and was set aside as {aside!r}: {error}")

    def _delete_leftovers(self) -> None:
        """Delete what a kill left unfinished; by its name it is nobody's checkpoint."""
        if not os.path.isdir(self.directory):
            return
        for name in os.listdir(self.directory):
            if name.startswith((SAVING, REMOVING)):
                path = self._path(name)
                is_directory = os.path.isdir(path) and not os.path.islink(path)
                remove_if_there(shutil.rmtree if is_directory else os.unlink, path)


def _sorted(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.order, entry.update))


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
