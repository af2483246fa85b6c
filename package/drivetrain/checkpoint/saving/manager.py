"""The checkpoints of one run: save, rank, prune and recover them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from operator import attrgetter

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.saving.background import Background, HostBuffers
from drivetrain.checkpoint.saving.config import CheckpointConfig, as_policies, rankings
from drivetrain.checkpoint.saving.index import PURPOSE, Entry, oldest_first, rank, retain, write_index
from drivetrain.checkpoint.saving.io import CheckpointIO, DirectoryCheckpointIO
from drivetrain.checkpoint.saving.lock import DirectoryLock
from drivetrain.checkpoint.saving.recovery import load_together, recover, set_aside
from drivetrain.checkpoint.saving.sharding import Like, plan_save
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError, ConfigError, nearest
from drivetrain.core.messages import logger
from drivetrain.distributed.ranks import ALONE, Ranks

_LOG = logger(__name__)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The result of `CheckpointManager.save`: a checkpoint that is committed, or is being written.

    Attributes:
        path: The checkpoint's directory.
        is_best: Whether it is now among the best by a metric.
    """

    path: str
    is_best: bool


@dataclass(slots=True)
class _PendingSave:
    """One save: the entries before and after it, and its progress on the disk.

    Attributes:
        entry: The checkpoint that is saved, or that gets an additional purpose.
        there: The entries that exist by now.
        every: The entries with this one, before pruning.
        trouble: Harmless problems to warn of.
    """

    entry: Entry
    there: list[Entry]
    every: list[Entry]
    stays: list[Entry]
    goes: list[Entry]
    is_written: bool = False
    trouble: list[str] = field(default_factory=list)


class CheckpointManager:
    """A manager of the checkpoints of one run directory: it saves, ranks, prunes and recovers them.

    The index file decides the order and the purpose of the checkpoints; the disk decides which of them exist.
    The first use reconciles the two, so a kill at any moment loses at most the checkpoint that was being
    saved. One job at a time may write to a directory. Each of its processes has a manager, and all call the
    same methods in the same order. Writing to a directory that another job has locked raises; `lock` keeps
    other jobs out until `release`.

    Args:
        directory: The directory of the checkpoints and their index; created by the first save.
        config: The policy, or several. With `asynchronous`, `save` returns once the state is copied to the
            host's memory, and the next call of `save`, `poll` or `wait` raises any error of the write.
        io: The storage; None uses directories.
        files: The file system of the directory; None chooses it by the path.
        ranks: The processes of the job.
    """

    def __init__(
        self,
        directory: str,
        config: CheckpointConfig | Sequence[CheckpointConfig],
        io: CheckpointIO | None = None,
        *,
        files: FileSystem | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.directory = directory
        self.policies = as_policies(config)
        self.files = file_system(directory) if files is None else files
        self.ranks = ranks
        # A background save must not share a process group with the training: their messages would mix.
        self._behind = ranks.sibling() if self._is_asynchronous else ranks
        self.io: CheckpointIO = DirectoryCheckpointIO(self.files, self._behind) if io is None else io
        self._entries: list[Entry] = []
        self._opened = False
        self._lock: DirectoryLock | None = None
        # Saved or loaded by this manager: only these are known to hold this run's state at their step.
        self._matching: set[str] = set()
        self._background = Background()
        self._buffers = HostBuffers()
        self._in_flight: _PendingSave | None = None

    @property
    def _is_asynchronous(self) -> bool:
        return self.policies[0].asynchronous

    def lock(self) -> None:
        """Keep other jobs out of the directory until `release`, or until this process ends; `fit` calls this.

        Raises:
            ConfigError: Another job, or another fit of this process, holds the lock; or a rank sees another
                directory at this path.
            CheckpointError: The lock cannot be written. Each save tries again.
        """
        lock = self._lock = self._lock or DirectoryLock(self.directory, self.files)
        token = self.ranks.first(lock.take)
        if self.files.renames and not self.ranks.alone:  # a disk, which a machine may not have mounted
            self.ranks.together(lambda: lock.check_seen(token, self.ranks.rank))

    def release(self) -> None:
        """Release the lock, so that other jobs can write to the directory. Save nothing afterwards."""
        lock, self._lock = self._lock, None
        if lock is not None and self.ranks.rank == 0:
            lock.release()

    def entries(self) -> tuple[Entry, ...]:
        """Return all checkpoints, oldest first, including one that is being written."""
        self._open()
        return tuple(self._entries)

    def best(self, by: str | None = None) -> str | None:
        """Return the path of the best checkpoint, unverified, or None if there is none.

        Args:
            by: The metric that ranks; None takes the metric of the first policy that keeps the best.

        Raises:
            ConfigError: No policy ranks by this metric; lists the others.
        """
        self._open()
        for name, policy in self._rankings(by).items():
            ranked = rank(self._entries, name, policy.direction)
            return self._path(ranked[0].name) if ranked else None
        return None

    def best_value(self, by: str) -> float | None:
        """Return the value of the best checkpoint by a metric, or None if there is none."""
        self._open()
        ranked = rank(self._entries, by, self._rankings(by)[by].direction)
        return ranked[0].metrics[by] if ranked else None

    def load_latest(self, like: Like | None = None) -> tuple[str, Snapshot] | None:
        """Read the newest good checkpoint.

        A damaged checkpoint is renamed to `<name>.bad` with a warning that names the fault, and the previous
        one is tried.

        Args:
            like: As in `CheckpointIO.load`.

        Returns:
            The path and the content, or None if there is no checkpoint.

        Raises:
            CheckpointError: The newest checkpoint seems intact, but has a newer format, is not readable now,
                or is not visible to every process. An older one is never loaded silently instead.
        """
        self.wait()
        self._open()
        for entry in reversed(self._entries):
            path = self._path(entry.name)
            loaded = load_together(path, like, self.io, self.files, self.ranks)
            if isinstance(loaded, DamagedCheckpointError):
                self._set_aside(entry.name, loaded)
                continue
            self._matching.add(entry.name)
            return path, loaded
        return None

    def should_keep(self, metrics: Mapping[str, float], by: str | None = None) -> bool:
        """Return whether a checkpoint with these metrics would be among the best.

        Args:
            metrics: The metrics of the last evaluation, by full name.
            by: The metric to rank by; None tries the metric of each policy.

        Raises:
            ConfigError: A metric that ranks is missing; lists the others.
        """
        self._open()
        among = _among(self._rankings(by), metrics)
        entry = Entry("", 0, 0, 0, dict(metrics), (), among)
        return bool(retain([*self._entries, entry], self.policies)[0][-1].best)

    def save(
        self,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        snapshot_factory: Callable[[], Snapshot],
        *,
        resume: bool | Collection[str] = True,
        best: bool | Collection[str] = False,
    ) -> SavedCheckpoint:
        """Commit a checkpoint, then remove those that no policy keeps.

        A second save at a step that this manager has just saved, or resumed from, writes nothing: the
        existing checkpoint gets the additional purpose.

        Args:
            step: The number of steps made.
            epoch: The number of epochs made.
            metrics: The latest metrics; the index stores those that rank checkpoints.
            snapshot_factory: Returns the content; called only if something is written.
            resume: Save as a resume point. True means a resume point of the first policy; names mean one of
                each policy with that `interval_name`, where "" is the first policy.
            best: Save as one of the best, if `should_keep` returns True. True tries each metric that ranks;
                names try only those metrics.

        Raises:
            CheckpointError: The write failed, or the background write before it did. Earlier checkpoints and
                the index are unchanged.
            ConfigError: Neither purpose is given, no policy has it, a metric that ranks is missing, or
                another job has locked the directory.
        """
        if not (resume or best):
            raise ConfigError("save() needs a purpose: resume=True, best=True, or both")
        intervals = self._intervals(resume)
        self.wait()  # never two at a time: they would need twice the memory, and could finish out of order
        self._open()
        if self._lock is not None:
            self.ranks.first(self._lock.confirm)
        # The pruning, which ranks it with the others, decides whether it is good enough.
        among = _among(self._rankings_for(best), metrics)
        known = {
            by: float(metrics[by])
            for by in filter(None, map(attrgetter("by"), self.policies))
            if by in metrics
        }
        candidates = (each for each in self._entries if each.step == step)
        same = next((each for each in candidates if each.name in self._matching), None)
        snapshot = None
        if same is None:
            order = max((each.order for each in self._entries), default=0) + 1
            name = self.ranks.first(lambda: self._free_name(step))
            entry = Entry(name, order, step, epoch, known, intervals, among)
            snapshot = self._with_purpose(entry, snapshot_factory())
        else:
            entry = replace(
                same,
                metrics={**known, **same.metrics, **{by: known[by] for by in among}},
                resume=tuple(dict.fromkeys((*same.resume, *intervals))),
                best={**same.best, **among},
            )
        every = oldest_first([*(each for each in self._entries if each is not same), entry])
        stays, goes = retain(every, self.policies)
        is_written = same is not None
        job = _PendingSave(entry, every if is_written else self._entries, every, stays, goes, is_written)
        if self._is_asynchronous:
            self._begin_behind(job, snapshot)
        else:
            try:
                self._perform(job, snapshot)
            finally:
                self._settle(job)
        is_best = any(each.name == entry.name and bool(each.best) for each in job.stays)
        return SavedCheckpoint(self._path(entry.name), is_best)

    def prune(self, spared: str | None, values: Mapping[str, float]) -> None:
        """Remove the checkpoints that a killed job has left and no policy keeps; called when a fit starts.

        Args:
            spared: The path of the checkpoint that the fit resumes from; it is never removed. Its place in a
                ranking is kept only if `values` has the value that ranked it: the end of an earlier, shorter
                fit may have added a value that this fit does not have.
            values: The metrics that the fit resumes with.
        """
        self._open()
        for index, each in enumerate(self._entries):
            if self._path(each.name) == spared:
                best = {by: mode for by, mode in each.best.items() if values.get(by) == each.metrics.get(by)}
                self._entries[index] = replace(each, best=best)
        stays, goes = retain(self._entries, self.policies)
        gone = [each for each in goes if self._path(each.name) != spared]
        if gone:
            stays = oldest_first([*stays, *(each for each in goes if each not in gone)])
            job = _PendingSave(stays[-1], self._entries, self._entries, stays, gone)
            try:
                self._perform(job, None)
            finally:
                self._settle(job)

    @property
    def is_writing(self) -> bool:
        """Whether a background save has begun, and neither `poll` nor `wait` has reported its end."""
        return self._in_flight is not None

    def poll(self) -> str | None:
        """Report the end of a background save.

        Returns:
            The path of the committed checkpoint, or None if no save has ended.

        Raises:
            CheckpointError: The write failed. Earlier checkpoints and the index are unchanged.
        """
        if self._in_flight is None:
            return None
        # All ranks must report it at the same step.
        ended = self.ranks.total([not self._background.is_busy])[0] == self.ranks.size
        return self.wait() if ended else None

    def wait(self) -> str | None:
        """Wait for a background save to end, then return or raise as `poll`."""
        job = self._in_flight
        if job is None:
            return None
        error = self._background.wait()
        self._in_flight = None
        self._settle(job)
        if error is not None:
            raise error
        return self._path(job.entry.name)

    def _begin_behind(self, job: _PendingSave, snapshot: Snapshot | None) -> None:
        """Begin a save in the background."""
        if snapshot is not None:
            # Planned here: the plan needs the live tensors, and only this process's share is copied.
            snapshot.plan = plan_save(snapshot.tensors, snapshot.objects.keys(), self.ranks)
            snapshot = self._buffers.copy(snapshot)

        def write() -> None:
            self._buffers.wait()
            self._perform(job, snapshot)

        self._background.start(write)
        self._entries = job.stays
        self._in_flight = job

    def _perform(self, job: _PendingSave, snapshot: Snapshot | None) -> None:
        """Do the work on the disk, in the calling thread."""
        if snapshot is not None:
            self.io.save(self._path(job.entry.name), snapshot)
            job.is_written, job.there = True, job.every
        # The index first: a kill in between leaves an extra checkpoint, which the next open finds, and never
        # loses one.
        self._behind.first(lambda: write_index(self.directory, job.stays, self.files))
        job.there = job.stays
        if self._behind.rank == 0:
            for entry in job.goes:
                try:
                    self.io.remove(self._path(entry.name))
                except CheckpointError as error:
                    if not self._is_gone(entry):
                        job.trouble.append(f"an old checkpoint could not be removed: {error}")

    def _is_gone(self, entry: Entry) -> bool:
        """Return whether someone else has removed a checkpoint, perhaps with its whole directory."""
        try:
            return self.files.kind(self._path(entry.name)) is None
        except OSError:
            return False

    def _settle(self, job: _PendingSave) -> None:
        self._entries = job.there
        if job.is_written:
            self._matching.add(job.entry.name)
        for text in job.trouble:
            _LOG.warning(text)

    def _path(self, name: str) -> str:
        return self.files.join(self.directory, name)

    def _free_name(self, step: int) -> str:
        # The name is taken if the run resumed from an earlier checkpoint, and reaches this step again.
        name = f"step-{step:08d}"
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        with os_errors("write to", self.directory):
            return next(each for each in names if self.files.kind(self._path(each)) is None)

    def _rankings(self, by: str | None = None) -> dict[str, CheckpointConfig]:
        """Return the policies that keep the best, by their metrics; or only the one for a metric."""
        policies = rankings(self.policies)
        if by is None:
            return policies
        if by not in policies:
            raise ConfigError(f"no policy keeps the best by {by!r}. {nearest(by, policies)}")
        return {by: policies[by]}

    def _rankings_for(self, best: bool | Collection[str]) -> dict[str, CheckpointConfig]:
        if isinstance(best, bool):
            return self._rankings() if best else {}
        return {name: each for by in best for name, each in self._rankings(by).items()}

    def _intervals(self, resume: bool | Collection[str]) -> tuple[str, ...]:
        if isinstance(resume, bool):
            return ("",) if resume else ()
        known = ["", *(each.interval_name for each in self.policies if each.interval_name is not None)]
        for each in resume:
            if each not in known:
                raise ConfigError(f"no policy has the interval {each!r}. {nearest(each, known)}")
        return tuple(resume)

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
                _LOG.warning(text)

    def _set_aside(self, name: str, error: DamagedCheckpointError) -> None:
        self._entries = [entry for entry in self._entries if entry.name != name]

        def act() -> str:
            moved, text = set_aside(self._path(name), error, self.files)
            if moved:
                write_index(self.directory, self._entries, self.files)
            return text

        text = self.ranks.first(act)
        if self.ranks.rank == 0:
            _LOG.warning(text)


def _among(policies: Mapping[str, CheckpointConfig], metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics that may rank a checkpoint among the best, with their directions; NaN never does."""
    for by in policies:
        if by not in metrics:
            raise ConfigError(
                f"checkpoints are ranked by the metric {by!r}, which this run has not logged so far. "
                f"{nearest(by, metrics)} Set CheckpointConfig(by=...), or by=None to rank none"
            )
    return {by: policy.direction for by, policy in policies.items() if not math.isnan(metrics[by])}
