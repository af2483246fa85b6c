"""What a program may ask about its processes at any time, also before there is a process group."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from drivetrain.distributed.environment import detect


def rank() -> int:
    """This process's number among those of its job; 0 where there is one."""
    if _is_grouped():
        return torch.distributed.get_rank()
    found = detect(os.environ)
    return 0 if found is None else found.rank


def world_size() -> int:
    """How many processes the job has.

    A program without a launcher is one process until a Trainer or an Engine starts the others.
    """
    if _is_grouped():
        return torch.distributed.get_world_size()
    found = detect(os.environ)
    return 1 if found is None else found.world_size


def _is_grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def one_at_a_time(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let one process after the other through, on all machines that share a directory.

    For what is to be downloaded or prepared once: the first makes it, the others find it made. It needs no
    process group, and serves programs started by any launcher, or by hand, at once or one after the other. A
    process that dies lets the next one in.

    Args:
        path: What is made; "path.lock" beside it is the lock, and stays.

    Raises:
        OSError: The file system has no locks.

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
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+b") as file:
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
            except OSError as error:  # it has tried ten times, for ten seconds
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
        # Closing it is not enough: a process that was forked meanwhile has it open too.
        fcntl.flock(file, fcntl.LOCK_UN)
