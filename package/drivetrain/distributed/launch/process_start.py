"""The start time of a process."""

from __future__ import annotations

import os
import sys
import time
from time import perf_counter

from drivetrain.distributed.failure.heartbeat import stat_of

_IMPORTED = perf_counter()

_START = 19
"""The field of `stat_of` that holds the start."""


def process_age() -> float:
    """Return seconds since this process began; without Linux, since drivetrain was imported."""
    since_import = perf_counter() - _IMPORTED
    ticks = process_started(os.getpid())
    if ticks is None or sys.platform != "linux":
        return since_import
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), since_import)


def process_started(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since boot; None if unknown."""
    if sys.platform != "linux":
        return None
    try:
        return int(stat_of(pid)[_START]) or None
    except (OSError, ValueError, IndexError):  # no such process, or a sandbox with a fake /proc
        return None
