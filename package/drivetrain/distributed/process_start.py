"""When this process began."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter

_IMPORTED = perf_counter()

_START = 19
"""Which field of /proc/self/stat, after the program's name, is the start of the process; see proc(5)."""


def process_age() -> float:
    """Seconds since this process began: by the system on Linux, elsewhere since drivetrain was imported."""
    since_import = perf_counter() - _IMPORTED
    with suppress(OSError, ValueError, IndexError):  # a system without it, or a sandbox that fakes it
        age = _age()
        if age is not None and age >= since_import:
            return age
    return since_import


def _age() -> float | None:
    if sys.platform != "linux":
        return None
    import time

    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(stat.rpartition(")")[2].split()[_START])
    if ticks <= 0:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
