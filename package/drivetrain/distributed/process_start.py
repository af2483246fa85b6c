"""When a process began."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter

_IMPORTED = perf_counter()

_START = 19
"""Which field of /proc/PID/stat, after the program's name, is the start of the process; see proc(5)."""


def process_age() -> float:
    """Seconds since this process began: by the system on Linux, elsewhere since drivetrain was imported."""
    since_import = perf_counter() - _IMPORTED
    age = _age()
    return since_import if age is None else max(age, since_import)


def process_started(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since the boot; None if that is not known."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START]) or None
    except (OSError, ValueError, IndexError):  # no such process, or a sandbox that fakes it
        return None


def _age() -> float | None:
    ticks = process_started(os.getpid())
    if ticks is None or sys.platform != "linux":
        return None
    import time

    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
