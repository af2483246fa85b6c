"""Rank, world size and a lock between processes, also before there is a process group."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch

from drivetrain.core.files import check_path, make_directory, open_file
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.sockets import closing_sockets_in_forks

_asked_alone: str | None = None

_NO_LIMIT = timedelta(days=365)
"""For waiting on a download: torch's own limit is half an hour."""


def rank() -> int:
    """Return this process's rank in its job; 0 if the job has one process."""
    return (_rank_and_size() or (0, 1))[0]


def local_rank() -> int:
    """Return this process's rank among those of its machine; 0 if the job has one process."""
    found = detect(os.environ)
    return rank() if found is None else found.local_rank


def world_size() -> int:
    """Return the number of processes of the job.

    A program without a launcher is one process until a Trainer or an Engine starts the others.
    """
    global _asked_alone
    if (found := _rank_and_size()) is not None:
        return found[1]
    caller = sys._getframe(1)
    if _asked_alone is None and not caller.f_globals.get("__name__", "").startswith("drivetrain."):
        _asked_alone = f"world_size() at {os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    return 1


def _rank_and_size() -> tuple[int, int] | None:
    """Return rank and world size; None if the program has one process so far."""
    if is_grouped():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = detect(os.environ)
    return None if found is None else (found.rank, found.world_size)


def asked_alone() -> str | None:
    """Return where a program of one process first called `world_size`, which other processes may know later;
    None if nowhere.
    """
    return _asked_alone if _rank_and_size() is None else None


def is_grouped() -> bool:
    """Return whether this process has formed torch's process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def has_fake_ranks() -> bool:
    """Return whether torch's "fake" group stands for the other ranks, as in a plan: there is none to meet."""
    return is_grouped() and torch.distributed.get_backend() == torch.distributed.Backend.FAKE


def once_per_machine(act: Callable[[], object], *, once: bool = False) -> None:
    """Call a function in one process of each machine, while the others wait for it without a time limit.

    All processes must call it, after they are connected; before that, each calls the function.

    Args:
        act: The function. If it raises, the error is the caller's, who must end the other processes.
        once: Whether one process of the whole job calls it, for machines that share their files.
    """
    if world_size() == 1 or not is_grouped():
        act()
        return
    with closing_sockets_in_forks():
        group = torch.distributed.new_group(backend="gloo", timeout=_NO_LIMIT)
    if (rank() if once else local_rank()) == 0:
        act()
    torch.distributed.barrier(group)
    torch.distributed.destroy_process_group(group)


@contextmanager
def one_at_a_time(path: str | os.PathLike[str]) -> Iterator[None]:
    """Run the block in one process at a time, on all machines that share a directory.

    Use it for a download or a preparation: the first process makes the file, the others find it. It needs no
    process group, and works for programs started by any launcher or by hand. A process that dies releases
    the lock.

    Args:
        path: The file to make. The lock is "path.lock" beside it, which is not deleted.
    Raises:
        OSError: The file system has no locks, or the lock is no regular file.

    Example:
        ```python
        from pathlib import Path

        from drivetrain import one_at_a_time

        words = Path("words.txt")
        with one_at_a_time(words):
            if not words.exists():
                words.write_text("what takes long to make", encoding="utf-8")
        ```
    """
    lock = Path(f"{os.fspath(path)}.lock")
    check_path(lock)
    make_directory(lock.parent)
    with open_file(lock, "a+b") as file:
        _lock(file)
        try:
            yield
        finally:
            _unlock(file)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        file.seek(0)
        while True:
            try:
                return msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
            except OSError as error:  # it has tried ten times in ten seconds
                if error.errno != errno.EDEADLK:
                    raise

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

    def _unlock(file: IO[bytes]) -> None:
        # Closing the file is not enough: a process forked meanwhile has it open too.
        fcntl.flock(file, fcntl.LOCK_UN)
