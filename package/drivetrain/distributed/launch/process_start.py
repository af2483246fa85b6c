"""The start time of a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter

_IMPORTED = perf_counter()

_START = 19
"""The field of /proc/PID/stat, counted after the program's name, that holds the start; see proc(5)."""


def process_age() -> float:
    """Return seconds since this process began; without Linux, since drivetrain was imported."""
    since_import = perf_counter() - _IMPORTED
    age = _age()
    return since_import if age is None else max(age, since_import)


def process_started(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since boot; None if unknown."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START]) or None
    except (OSError, ValueError, IndexError):  # no such process, or a sandbox with a fake /proc
        return None


def _age() -> float | None:
    ticks = process_started(os.getpid())
    if ticks is None or sys.platform != "linux":
        return None
    import time

    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
