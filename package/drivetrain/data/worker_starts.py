"""Whether workers that were started have come to life.

A copy of a process (a fork) has one thread, and finds locked for ever what another one had locked at that
moment: rarely, and more often where threads come and go, a lock of the interpreter's or of a library's, which
it needs before its first line. Such a worker sleeps, nothing ends it, and its batch is waited for for ever.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from drivetrain.distributed.silence import activity

PATIENCE = 10.0
"""Seconds after which it is looked at what a worker does that has not begun; it takes milliseconds to."""

_LOOKED_AT = 1.0
"""Seconds for which it is looked at."""

_BUSY = 0.03
"""Seconds of a core in which a worker that sleeps for good uses less."""


class Marks:
    """Memory that copies of this process share with it, in which each worker marks that it runs.

    Args:
        count: How many workers.
    """

    def __init__(self, count: int) -> None:
        self._shared = mmap.mmap(-1, count)

    def set(self, worker: int) -> None:
        """In a worker: it runs."""
        self._shared[worker] = 1

    def missing(self) -> list[int]:
        """The workers that have not marked that they run."""
        return [worker for worker, mark in enumerate(self._shared[:]) if not mark]


def marks_for(loader: Any) -> Marks | None:
    """Marks for the workers of a loader; None where they are no copies, or cannot be looked at."""
    context = loader.multiprocessing_context or multiprocessing
    if sys.platform != "linux" or context.get_start_method() != "fork":
        return None
    return Marks(loader.num_workers)


def lifeless(iterator: Any, marks: Marks) -> list[int]:
    """Wait until all of a loader's workers run; gives those that never will.

    One that does something, or has ended, which torch tells, is not among them.
    """
    delay, looked_at = 0.0005, time.monotonic() + PATIENCE
    while missing := marks.missing():
        time.sleep(delay)
        delay = min(2 * delay, 0.05)
        pids = dict(_alive(iterator, missing))
        if not pids:
            return []
        if time.monotonic() < looked_at:
            continue
        before = {worker: activity(pid) for worker, pid in pids.items()}
        time.sleep(_LOOKED_AT)
        found = [each for each in pids if _sleeps(before[each].used, pids[each])]
        found = [each for each in found if each in marks.missing()]
        if found:
            return found
        looked_at = time.monotonic() + PATIENCE
    return []


def _alive(iterator: Any, workers: list[int]) -> Iterator[tuple[int, int]]:
    for worker in workers:
        process = iterator._workers[worker]
        if process.is_alive():
            yield worker, process.pid


def _sleeps(used: float, pid: int) -> bool:
    now = activity(pid)
    return now.state in ("S", "T") and now.used - used < _BUSY


def kill(iterator: Any, workers: list[int]) -> None:
    """Kill workers that have not begun: nothing less ends them, and they hold nothing that others need."""
    for worker in workers:
        process = iterator._workers[worker]
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join(5.0)


def told(iterator: Any, workers: list[int]) -> str:
    """Who has not begun, and why that may be."""
    named = ", ".join(f"worker {each} (pid {iterator._workers[each].pid})" for each in workers)
    return (
        f"{named} sleeps and has not come to its first line {PATIENCE:g} s after it was started: stopped, or"
        " locked as it was copied from this process while another thread was in the middle of something"
    )
