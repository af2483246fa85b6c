"""The stacks of a process whose job fails, in a file of their own: also where it cannot write them itself."""

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

from drivetrain.distributed.silence import activity

_TRIED = 8
"""Signals that are looked at for one that nobody uses."""

_ANSWER = 0.3
"""Seconds that a process has to write its stacks when it is sent the signal."""

_FOR_WORKERS = 0.6
"""Seconds for all worker processes of a rank together."""

_choosing = threading.Lock()


class Stacks:
    """Writes the stacks of a process, and lets other processes of its machine have them.

    On Linux a real-time signal that nobody uses makes the process write them to a file in memory, from
    `faulthandler`'s own handler, which needs no interpreter: a call that holds it does not keep them back.
    Whoever may send the signal may read the file. Processes that are forked from this one, such as a
    loader's workers, do the same. Nothing reaches a disk before a failure.

    Attributes:
        signal: The number of the signal; 0 where there is none.
        descriptor: The file in memory, in this process; -1 where there is none.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.descriptor = -1
        self._owner = 0

    def open(self) -> None:
        """Begin, once in a process: what it costs is a file's number, until the process ends."""
        if sys.platform != "linux" or self._owner == os.getpid():
            return
        with _choosing:
            if self.signal:  # a copy of the process that has begun, whose file this is
                os.close(self.descriptor)
                self.signal = 0
            last = int(signal.SIGRTMAX)
            free = (each for each in range(last, last - _TRIED, -1) if not _is_handled(os.getpid(), each))
            self.signal = next(free, 0)
            if self.signal:
                self.descriptor = os.memfd_create("drivetrain-stacks")
                faulthandler.register(self.signal, file=self.descriptor, all_threads=True)
            if not faulthandler.is_enabled():
                # An abort, as by gloo where ranks make different collectives, else ends it without a word.
                faulthandler.enable(file=2, all_threads=True)
            self._owner = os.getpid()

    def write(self, path: Path, title: str, error: BaseException | None = None) -> None:
        """Write them to a file, the newest call last, and those of the process's workers.

        Args:
            path: The file; its directory is made.
            title: The first line.
            error: What was raised here, if something was: its traceback comes first.

        Raises:
            FileExistsError: Another process has written them there.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
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
"""This process's."""


def asked(pid: int, number: int, owner: int, descriptor: int) -> str:
    """The stacks of another process of this machine; empty when it does not answer.

    Args:
        pid: The process.
        number: The signal that makes it write.
        owner: The process that has the file open: the same, or the one that it was forked from.
        descriptor: The file there.
    """
    if not number or not _is_handled(pid, number):  # else it would end the process
        return ""
    path = f"/proc/{owner}/fd/{descriptor}"
    try:
        before = os.stat(path).st_size
        os.kill(pid, number)
        if activity(pid).state == "T":
            os.kill(pid, signal.SIGCONT)  # else it would not hear the other
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
    except OSError:  # it has ended meanwhile
        return ""


def _is_handled(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return pid == os.getpid()
