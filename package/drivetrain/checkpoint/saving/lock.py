"""A lock that keeps two jobs from writing to one directory of checkpoints.

The lock is a small file that names its owner: the machine, the process and its start time. On a disk it is
created in one step, so if several jobs start at the same moment, one of them gets it. An object store lacks
such a step: there the lock is written and read back, and a job that lost the race notices at its next save.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from types import NoneType

from drivetrain.checkpoint.format.strict_json import as_record, parse_json
from drivetrain.checkpoint.storage.files import HashedReader, delete_if_there, write_atomically, write_file
from drivetrain.checkpoint.storage.filesystem import SAVING, DamagedCheckpointError, FileSystem, os_errors
from drivetrain.core.errors import CheckpointError, ConfigError, DrivetrainError
from drivetrain.core.types import Json
from drivetrain.distributed.failure.heartbeat import is_gone, machine
from drivetrain.distributed.launch.process_start import process_started

LOCK = "lock.json"

EXPIRES = 600.0
"""Seconds without a renewal after which the lock of a job on another machine is taken over."""

RENEWS = 60.0
"""Seconds between two renewals."""

_LATEST = 1e11
"""The largest time, in seconds since 1970 or in ticks since the system's start."""

_LARGEST_PID = 1 << 31

_APPEARS = 5.0
"""Seconds that a network disk has to show a new file on another machine."""

_TRIES = 100
"""The most attempts to take a lock while other jobs that started at the same moment replace it."""

_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Environment variables with a batch system's job number."""

_FIELDS = {"host": str, "machine": str, "pid": int, "started": int, "job": str, "token": str}
_FIELDS |= {"since": float, "renewed": float}

_held: set[str] = set()
"""The tokens of the locks that this process holds."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The job that holds a lock, as the lock file names it.

    Attributes:
        machine: The machine and the process namespace in which `pid` counts.
        started: The start time of that process, in the system's ticks; None if unknown.
        job: Its number in the batch system, such as "SLURM_JOB_ID=42"; empty if there is none.
        token: Unique for each fit.
    """

    host: str
    machine: str
    pid: int
    started: int | None
    job: str
    token: str
    since: float
    renewed: float

    @property
    def is_this_process(self) -> bool:
        """Whether a fit of this process holds the lock."""
        return self.pid == os.getpid() and self.token in _held

    @property
    def is_on_this_machine(self) -> bool:
        """Whether this process can inspect the owner's process."""
        return self.machine == _machine()

    def is_alive(self, now: float) -> bool:
        """Return whether the owner may still write to the directory."""
        if not self.is_on_this_machine:
            return now - self.renewed < EXPIRES
        if self.pid == os.getpid():
            return self.is_this_process
        # Without a known start time, a process of this number counts as the owner.
        return not is_gone(self.pid) and process_started(self.pid) in (None, self.started)


class DirectoryLock:
    """The lock of one directory of checkpoints, held by rank 0 of a job from the start of a fit to its end.

    While it is held, a thread renews it once a minute, so that a run that saves rarely keeps it.
    """

    def __init__(self, directory: str, files: FileSystem, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self.path = files.join(directory, LOCK)
        self._files = files
        self._clock = clock
        self._token = secrets.token_hex(8)
        self._pid = os.getpid()
        self._is_new = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._turn = threading.Lock()

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock, by its own record."""
        return self._token in _held

    def refuse_others(self) -> None:
        """Check that no other job holds the lock, without taking it."""
        with os_errors("read", self.path):
            found = self._read(self.path)
        if found is not None and not found.is_this_process and found.is_alive(self._clock()):
            raise ConfigError(self._refusal(found))

    def take(self) -> str:
        """Take the lock, even from a dead owner.

        Returns:
            The text in the file that no other job's lock has.

        Raises:
            ConfigError: A living job, or another fit of this process, holds it; names it, and what to do.
            CheckpointError: The lock cannot be read or written.
        """
        with self._turn:
            self._take()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="drivetrain-lock", daemon=True)
            with suppress(RuntimeError):  # without a thread, each save renews it
                self._thread.start()
            atexit.register(self.release)
        return self._token

    def check_seen(self, token: str, rank: int) -> None:
        """Check that this process sees the lock that another rank has taken, and may write beside it."""
        until = time.monotonic() + _APPEARS
        while True:
            with os_errors("read", self.path):
                found = self._read(self.path)
            if found is not None and found.token == token:
                break
            if time.monotonic() >= until:
                raise ConfigError(
                    f"rank {rank} on {socket.gethostname()} does not see the lock that rank 0 has written to"
                    f" {self.path!r}: the path leads to another disk there. The ranks save a checkpoint"
                    " together, so all need the same directory: mount the shared disk on that machine, or"
                    " give a run_dir that all machines share, or"
                    " CheckpointConfig(directory='s3://bucket/run')"
                )
            time.sleep(0.1)
        if self._files.renames and not os.access(self.directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"rank {rank} on {socket.gethostname()} may read {self.directory!r}, and not write to it:"
                " its disk is mounted read-only there, or its permissions forbid it. The ranks save a"
                " checkpoint together: mount the disk for writing, or give another run_dir"
            )

    def confirm(self) -> None:
        """Check before a save that the lock is still held; take it again if someone has removed the file.

        If the storage cannot be read or written now, this raises nothing: the save that follows reports it.
        """
        with suppress(OSError, CheckpointError):
            with self._turn:
                if self.is_held and self._renew():
                    return
            self.take()

    def release(self) -> None:
        """Release the lock if this process holds it; in a forked copy of the process, do nothing."""
        if self._pid != os.getpid():
            return
        self._ended.set()
        with self._turn:
            if self.is_held:
                with suppress(OSError, DrivetrainError):  # the next job will take it from a dead owner
                    found = self._read(self.path)
                    if found is not None and found.token == self._token:
                        self._files.delete(self.path)
                _held.discard(self._token)
            if self._is_new:
                with suppress(OSError):  # not empty: something was saved
                    os.rmdir(self.directory)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(5)
        atexit.unregister(self.release)

    def _keep(self) -> None:
        while not self._ended.wait(RENEWS):
            with self._turn, suppress(OSError, DrivetrainError):  # the next renewal or save tries again
                if self.is_held:
                    self._renew()

    def _renew(self) -> bool:
        """Renew the lock file if it is due; return whether the file is this object's."""
        found = self._read(self.path)
        if found is None or found.token != self._token:
            return False
        now = self._clock()
        if now - found.renewed >= RENEWS / 2:
            write_atomically(self.path, [_dump(replace(found, renewed=now))], self._files)
        return True

    def _take(self) -> None:
        with os_errors("lock", self.path):
            if self._files.renames and self._files.kind(self.directory) is None:
                self._is_new = True
            self._files.make_directory(self.directory)
            for _ in range(_TRIES):
                found = self._read(self.path)
                if found is not None and found.token != self._token and found.is_alive(self._clock()):
                    _held.discard(self._token)
                    raise ConfigError(self._refusal(found))
                if self._replace(found):
                    _held.add(self._token)
                    return
        raise ConfigError(f"{self.path!r} cannot be taken: other jobs keep replacing it")

    def _replace(self, stale: Owner | None) -> bool:
        """Write this job's lock where there is none, or a dead owner's; return whether it is in place."""
        now, pid = self._clock(), os.getpid()
        job = next((f"{name}={os.environ[name]}" for name in _JOB_IDS if name in os.environ), "")
        host, started = socket.gethostname(), process_started(pid)
        own = Owner(host, _machine(), pid, started, job, self._token, since=now, renewed=now)
        if not self._files.renames:
            write_file(self.path, [_dump(own)], self._files)
        elif not self._link(own, stale):
            return False
        found = self._read(self.path)
        return found is not None and found.token == self._token

    def _link(self, own: Owner, stale: Owner | None) -> bool:
        """Create the complete lock file in one step, on a disk; return whether that succeeded.

        `write_atomically` replaces what is there, which may be the lock that another job has just written.
        """
        # The next job deletes a file of this name if this one is killed here.
        temporary = self._files.join(self.directory, f"{SAVING}{LOCK}-{secrets.token_hex(4)}")
        try:
            if stale is not None:
                try:
                    self._files.rename(self.path, temporary)
                except FileNotFoundError:
                    return False
                if self._read(temporary) != stale:  # another job has just taken the lock: give it back
                    _put(temporary, self.path)
                    return False
                self._files.delete(temporary)
            write_file(temporary, [_dump(own)], self._files)
            placed = _put(temporary, self.path)
        finally:
            delete_if_there(temporary, self._files)
        self._files.sync(self.directory)
        return placed

    def _read(self, path: str) -> Owner | None:
        """Return the owner in a lock file; None if there is no file."""
        try:
            with HashedReader(path, self._files, self._files.open(path)) as reader:
                return _owner(parse_json(reader.read_json(), "the file"))
        except FileNotFoundError:
            return None
        except (DamagedCheckpointError, OSError) as error:
            if isinstance(error, OSError) and self._files.kind(path) in (None, "file"):
                raise  # the storage does not answer, or the file has just gone
            raise ConfigError(
                f"{path!r} is not a lock that drivetrain wrote, so it is unknown whether a job is training"
                f" there: {error}. If none is, remove the file"
            ) from error

    def _refusal(self, owner: Owner) -> str:
        since = datetime.fromtimestamp(owner.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if owner.is_this_process:
            return (
                f"another fit of this process has been writing to {self.directory!r} since {since}. End it"
                " first (close the generator that Trainer.steps returned), or choose another run_dir"
            )
        job = f", {owner.job}" if owner.job else ""
        text = (
            f"{self.directory!r} is in use by another job: process {owner.pid} on {owner.host}{job}, since"
            f" {since}. Choose another run_dir, end that job, or, if it is no longer running, remove"
            f" {self.path!r}"
        )
        if owner.is_on_this_machine:
            return text
        age = max(0.0, self._clock() - owner.renewed)
        return (
            f"{text}. It was renewed {age:.0f} s ago on that machine; after {EXPIRES / 60:g} minutes without"
            " a renewal it expires"
        )


def _put(temporary: str, path: str) -> bool:
    """Give a file a second name if that name is free; return whether it was."""
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # the latter: the lock's holder has cleaned the directory
        return False
    except OSError:  # a disk without hard links, such as FAT; if renaming fails too, that raises
        os.rename(temporary, path)
    return True


def _owner(found: Json) -> Owner:
    """Return the owner in a lock file."""
    kinds = _FIELDS
    if isinstance(found, dict) and found.get("started") is None:
        kinds = {**_FIELDS, "started": NoneType}
    owner = Owner(**as_record(found, kinds, "the file"))
    if owner.pid >= _LARGEST_PID or max(owner.started or 0, owner.since, owner.renewed) >= _LATEST:
        raise DamagedCheckpointError("a number in it is too large")
    return owner


def _dump(owner: Owner) -> bytes:
    return json.dumps(asdict(owner), indent=2).encode("ascii")


def _machine() -> str:
    return machine() or socket.gethostname()
