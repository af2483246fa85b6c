"""The stacks of a process whose job fails, in a file; another process can get them if it is stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from drivetrain.core.files import open_file
from drivetrain.distributed.failure.silence import activity

_TRIED = 8
"""Signals that are tried in search of a free one."""

_ANSWER = 0.3
"""Seconds that a process has to write its stacks after the signal."""

_FOR_WORKERS = 0.6
"""Seconds for all worker processes of a rank together."""

_choosing = threading.Lock()


class Stacks:
    """Writes the stacks of a process, and makes them available to other processes of its machine.

    On Linux a free real-time signal makes the process write its stacks to a file in memory. `faulthandler`
    writes them in C, so it works even while a call holds the interpreter. Any process that may send the
    signal may read the file. Forked processes, such as a loader's workers, do the same. Nothing is written
    to a disk before a failure.

    Attributes:
        signal: The number of the signal; 0 if there is none.
        descriptor: The descriptor of the file in memory, in this process; -1 if there is none.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.descriptor = -1
        self._owner = 0

    def open(self) -> None:
        """Set the handler, once per process; it costs one file descriptor until the process ends."""
        if sys.platform != "linux" or self._owner == os.getpid():
            return
        with _choosing:
            if self.signal:  # a fork, which has inherited its parent's file
                os.close(self.descriptor)
                self.signal = 0
            last = int(signal.SIGRTMAX)
            free = (each for each in range(last, last - _TRIED, -1) if not is_handled(os.getpid(), each))
            self.signal = next(free, 0)
            if self.signal:
                self.descriptor = os.memfd_create("drivetrain-stacks")
                faulthandler.register(self.signal, file=self.descriptor, all_threads=True)
            if not faulthandler.is_enabled():
                # Otherwise an abort, as by gloo for mismatched collectives, ends the process silently.
                faulthandler.enable(file=2, all_threads=True)
            self._owner = os.getpid()

    def write(self, path: Path, title: str, error: BaseException | None = None) -> None:
        """Write the stacks of this process and its workers to a file, the newest call last.

        Args:
            path: The file; its directory is made. Text of another process in it stays.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_file(path, "a", encoding="utf-8") as file:
            file.write(f"{title}\n\n")
            if error is not None:
                file.writelines([*traceback.format_exception(error), "\n"])
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
            self._write_workers(file)

    def _write_workers(self, file: IO[str]) -> None:
        if not self.signal:
            return
        until = time.monotonic() + _FOR_WORKERS
        for each in multiprocessing.active_children():
            if each.pid is not None and time.monotonic() < until:
                text = asked(each.pid, self.signal, os.getpid(), self.descriptor)
                if text:
                    file.write(f"\nThe worker process {each.name} ({each.pid}):\n{text}")


stacks = Stacks()
"""The instance of this process."""


def asked(pid: int, number: int, owner: int, descriptor: int) -> str:
    """Return the stacks of another process of this machine; empty if it does not answer.

    Args:
        owner: The process that opened the file: the same one, or the one that it was forked from.
        descriptor: The file's descriptor there.
    """
    if not number or not is_handled(pid, number):  # an unhandled signal would kill it
        return ""
    path = f"/proc/{owner}/fd/{descriptor}"
    try:
        before = os.stat(path).st_size
        os.kill(pid, number)
        if activity(pid).state == "T":
            os.kill(pid, signal.SIGCONT)  # a stopped process handles no other signal
        until = time.monotonic() + _ANSWER
        size = before
        while time.monotonic() < until:
            time.sleep(0.01)
            last, size = size, os.stat(path).st_size
            if size == last > before:
                break
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(before)
            return file.read()
    except OSError:  # the process has ended meanwhile
        return ""


def is_handled(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, also by code outside Python; only Linux tells."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return pid == os.getpid()
