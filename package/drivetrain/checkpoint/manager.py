"""Which checkpoints a run keeps, and which it resumes from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from drivetrain.checkpoint.background import Background, HostBuffers
from drivetrain.checkpoint.config import CheckpointConfig
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.format import Snapshot
from drivetrain.checkpoint.index import PURPOSE, Entry, oldest_first, rank, retain, write_index
from drivetrain.checkpoint.io import CheckpointIO, DirectoryCheckpointIO
from drivetrain.checkpoint.lock import DirectoryLock
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.recovery import load_together, recover, removed, set_aside
from drivetrain.checkpoint.sharding import Like, plan_save
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import CheckpointError, ConfigError, nearest


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The result of `CheckpointManager.save`: a checkpoint that is committed, or is being written.

    Attributes:
        path: The checkpoint's directory.
        is_keeper: Whether it is among the best now.
    """

    path: str
    is_keeper: bool


@dataclass(slots=True)
class _Job:
    """One save: what is to become of the entries, and how far it has come on the disk.

    Attributes:
        entry: The checkpoint that is saved, or that gets an additional purpose.
        before: The entries without it.
        every: The entries with it, before anything is pruned.
        stays: Those that are kept.
        goes: Those that are not.
        is_written: Whether the checkpoint is there.
        is_indexed: Whether the index tells of it.
        trouble: What went wrong without harm.
    """

    entry: Entry
    before: list[Entry]
    every: list[Entry]
    stays: list[Entry]
    goes: list[Entry]
    is_written: bool = False
    is_indexed: bool = False
    trouble: list[str] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """What is known to be there by now."""
        if self.is_indexed:
            return self.stays
        return self.every if self.is_written else self.before


class CheckpointManager:
    """The checkpoints of one run directory: saves, ranks, prunes and recovers them.

    The index file is the truth about order and purpose; the disk is the truth about existence. At the first
    use the two are reconciled, so that a kill at any moment loses at most the checkpoint that was being
    saved. One job at a time may write to a directory; each of its processes has a manager, and all call the
    same methods in the same order. A directory that another job has locked is refused; `lock` keeps other
    jobs out until `release`.

    Args:
        directory: Where the checkpoints and their index are; created by the first save.
        config: The policy. With `asynchronous`, `save` returns once the state is copied to the host's memory,
            and what went wrong with writing it is raised by the next call of `save`, `poll` or `wait`.
        io: The storage; None for directories.
        files: The file system of the directory; None to tell by the path.
        ranks: The processes of the job.
    """

    def __init__(
        self,
        directory: str,
        config: CheckpointConfig,
        io: CheckpointIO | None = None,
        *,
        files: FileSystem | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.directory = directory
        self.config = config
        self.files = file_system(directory) if files is None else files
        self.ranks = ranks
        # What is written behind the run must not share a group with what the run does meanwhile: messages of
        # the two would meet.
        self._behind = ranks.sibling() if config.asynchronous else ranks
        self.io: CheckpointIO = DirectoryCheckpointIO(self.files, self._behind) if io is None else io
        self._entries: list[Entry] = []
        self._opened = False
        self._lock: DirectoryLock | None = None
        # Saved or loaded by this manager: only these are known to hold the state that the run has at their
        # update.
        self._ours: set[str] = set()
        self._background = Background()
        self._buffers = HostBuffers()
        self._in_flight: _Job | None = None
        self._committed: str | None = None

    def lock(self) -> None:
        """Keep other jobs out of the directory until `release`, or until this process ends; `fit` calls this.

        Raises:
            ConfigError: Another job, or another fit of this process, holds the lock.
            CheckpointError: The lock cannot be written. It is tried again at each save.
        """
        lock = self._lock = self._lock or DirectoryLock(self.directory, self.files)
        self.ranks.first(lock.take)

    def release(self) -> None:
        """Let other jobs write to the directory. Save nothing after that."""
        lock, self._lock = self._lock, None
        if lock is not None and self.ranks.rank == 0:
            lock.release()

    def entries(self) -> tuple[Entry, ...]:
        """All checkpoints, oldest first; one that is being written counts."""
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

    def load_latest(self, like: Like | None = None) -> tuple[str, Snapshot] | None:
        """Read the newest good checkpoint.

        A damaged one is renamed to `<name>.bad` with a warning that says what is wrong, and the one before is
        tried.

        Args:
            like: As in `CheckpointIO.load`.

        Returns:
            Its path and content, or None when there is none at all.

        Raises:
            CheckpointError: The newest seems intact, but is of a newer format, is not readable now, or is not
                seen by every process. An older one is never loaded instead without a word.
        """
        self.wait()
        self._open()
        for entry in reversed(self._entries):
            path = self._path(entry.name)
            loaded = load_together(path, like, self.io, self.files, self.ranks)
            if isinstance(loaded, DamagedCheckpointError):
                self._set_aside(entry.name, loaded)
                continue
            self._ours.add(entry.name)
            return path, loaded
        return None

    def disown(self) -> None:
        """Take note that the run no longer has the state of what was saved at an update that it comes to."""
        self._ours.clear()

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
        self._forget_removed()
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
            CheckpointError: It could not be written, or the one before could not, in the background; those
                before, and the index, are as they were.
            ConfigError: Neither purpose is given, a keeper's metric is missing, or another job has taken the
                directory.
        """
        if not (resume or keeper):
            raise ConfigError("save() needs a purpose: resume=True, keeper=True, or both")
        self.wait()  # never two at a time: they would need twice the memory, and could end in the wrong order
        self._open()
        if self._lock is not None:
            self.ranks.first(self._lock.confirm)
        self._forget_removed()
        # Whether it is good enough is left to the pruning, which ranks it with the others; NaN never is.
        keeper = keeper and self.config.keepers > 0 and not math.isnan(self._ranking_value(metrics))
        by = self.config.by
        ranked = {by: float(metrics[by])} if by is not None and by in metrics else {}
        same = next(
            (each for each in self._entries if each.update == update and each.name in self._ours), None
        )
        snapshot = None
        if same is None:
            order = max((each.order for each in self._entries), default=0) + 1
            name = self.ranks.first(lambda: self._free_name(update))
            entry = Entry(name, order, update, epoch, ranked, resume, keeper)
            snapshot = self._with_purpose(entry, snapshot_factory())
        else:
            known = ranked if keeper or not same.metrics else same.metrics
            entry = replace(same, metrics=known, resume=same.resume or resume, keeper=same.keeper or keeper)
        every = oldest_first([*(each for each in self._entries if each is not same), entry])
        job = _Job(entry, self._entries, every, *retain(every, self.config), is_written=same is not None)
        self._begin(job, snapshot)
        is_keeper = any(each.name == entry.name and each.keeper for each in job.stays)
        return SavedCheckpoint(self._path(entry.name), is_keeper)

    @property
    def is_writing(self) -> bool:
        """Whether a save in the background has begun, and `poll` or `wait` has not reported its end."""
        return self._in_flight is not None

    def poll(self) -> str | None:
        """Take note of a save in the background, if it has ended.

        Returns:
            The path of the checkpoint that was committed, or None.

        Raises:
            CheckpointError: It could not be written; those before, and the index, are as they were.
        """
        if self._in_flight is None:
            return None
        # All ranks take note of it at the same update.
        ended = self.ranks.total([not self._background.is_busy])[0] == self.ranks.size
        return self.wait() if ended else None

    def wait(self) -> str | None:
        """Return once nothing is being written; otherwise as `poll`."""
        job = self._in_flight
        if job is None:
            return None
        error = self._background.wait()
        self._in_flight = None
        self._settle(job)
        if error is not None:
            raise error
        return self._path(job.entry.name)

    def _begin(self, job: _Job, snapshot: Snapshot | None) -> None:
        if not self.config.asynchronous:
            try:
                self._perform(job, snapshot)
            finally:
                self._settle(job)
            return
        if snapshot is not None:
            # Planned here: the plan needs the live tensors, and the copy is to be of this process's share.
            snapshot.plan = plan_save(snapshot.tensors, snapshot.objects.keys(), self.ranks)
            snapshot = self._buffers.copy(snapshot)
        self._background.start(lambda: self._perform(job, snapshot))
        self._entries = job.stays
        self._in_flight = job

    def _perform(self, job: _Job, snapshot: Snapshot | None) -> None:
        """What is done on the disk, in whichever thread."""
        if snapshot is not None:
            self.io.save(self._path(job.entry.name), snapshot)
            job.is_written = True
        # The index first: a kill in between leaves a checkpoint too many, which the next open finds, never
        # one too few.
        self._behind.first(lambda: write_index(self.directory, job.stays, self.files))
        job.is_indexed = True
        if self._behind.rank == 0:
            for entry in job.goes:
                try:
                    self.io.remove(self._path(entry.name))
                except CheckpointError as error:
                    if not self._is_gone(entry):
                        job.trouble.append(f"an old checkpoint is still there: {error}")

    def _is_gone(self, entry: Entry) -> bool:
        """Whether somebody else has removed a checkpoint, with its whole directory perhaps."""
        try:
            return self.files.kind(self._path(entry.name)) is None
        except OSError:
            return False

    def _forget_removed(self) -> None:
        """Take note of checkpoints that somebody has removed: they rank no more, and are named once."""
        if not self._entries or self._in_flight is not None:
            return

        def missing() -> list[str]:
            try:
                there = self.files.entries(self.directory)
                if not there:  # or it cannot be looked at now, which says nothing of them
                    self.files.kind(self.directory)
            except OSError:
                return []
            return [each.name for each in self._entries if each.name not in there]

        gone = self.ranks.first(missing)
        if not gone:
            return
        if self.ranks.rank == 0:
            _warn(removed(self.directory, gone, self._entries, self.config))
        self._entries = [each for each in self._entries if each.name not in gone]

    def _settle(self, job: _Job) -> None:
        self._entries = job.entries()
        if job.is_written:
            self._ours.add(job.entry.name)
        for text in job.trouble:
            _warn(text)

    def _path(self, name: str) -> str:
        return self.files.join(self.directory, name)

    def _free_name(self, update: int) -> str:
        # Taken when the run was resumed from an earlier checkpoint than this one, and comes here a second
        # time.
        name = base = f"update-{update:08d}"
        number = 1
        with os_errors("write to", self.directory):
            while self.files.kind(self._path(name)) is not None:
                number += 1
                name = f"{base}-{number}"
        return name

    def _ranking_value(self, metrics: Mapping[str, float]) -> float:
        by = self.config.by or ""
        if by not in metrics:
            raise ConfigError(
                f"checkpoints are ranked by the metric {by!r}, which this run has not given so far. "
                f"{nearest(by, metrics)} Set CheckpointConfig(by=...), or by=None to keep none as the best"
            )
        return float(metrics[by])

    def _with_purpose(self, entry: Entry, snapshot: Snapshot) -> Snapshot:
        purpose = entry.to_json()
        del purpose["name"]
        return replace(snapshot, objects={**snapshot.objects, PURPOSE: purpose})

    def _open(self) -> None:
        if self._opened:
            return
        if self._lock is None:
            self.ranks.first(DirectoryLock(self.directory, self.files).refuse_others)
        found, trouble = self.ranks.first(lambda: recover(self.directory, self.io, self.files))
        self._entries = found
        self._opened = True
        if self.ranks.rank == 0:
            for text in trouble:
                _warn(text)

    def _set_aside(self, name: str, error: DamagedCheckpointError) -> None:
        self._entries = [entry for entry in self._entries if entry.name != name]

        def act() -> str:
            moved, text = set_aside(self._path(name), error, self.files)
            if moved:
                write_index(self.directory, self._entries, self.files)
            return text

        text = self.ranks.first(act)
        if self.ranks.rank == 0:
            _warn(text)


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
