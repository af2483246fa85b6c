"""Whether a process that sends no heartbeat is still worth waiting for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

PATIENCE = 12
"""Timeouts that a process may take to answer while it is idle or cannot be observed."""

ABOVE = "its own messages are above"
"""A note that a process may have written more to standard error."""

DIED = f"it was killed, perhaps for lack of memory, or ended by os._exit, or aborted ({ABOVE})"
"""Possible deaths of a process that another one started."""

UNREACHABLE = "its machine has not answered for 30 s: it went down, or the network did"
"""The end of a process whose connection the system has broken."""

_LOOKED_AT = 3
"""Ticks without a heartbeat after which the process is observed."""

_BUSY = 0.03
"""The share of a core that an idle process may use."""


class Activity(NamedTuple):
    """The state of a process, and the CPU seconds that it has used.

    The state is Linux's letter for its main thread: "R" runs, "S" sleeps, "D" waits for a disk, "T" is
    stopped; or "gone". It is empty if the process could not be observed, for lack of a file descriptor say.
    """

    state: str
    used: float


class Heartbeat:
    """The time since another process has sent something, in fifths of a timeout, and whether it has failed.

    A process that is stopped or gone has failed after one timeout. While a call holds the interpreter, as
    one of a library that computes or reads a large file, none of its threads can send anything. So a running
    process that can be observed, which takes Linux and the same machine, may take as long as it needs. An
    idle process, or one that cannot be observed, has `PATIENCE` timeouts.

    Time is counted in calls of `tick`, not by the clock: while this process is itself suspended, it
    misses no other's heartbeat.

    Attributes:
        ticks: Ticks since the process last sent something.
        is_near: Whether the process is on this machine and can be observed.
    """

    def __init__(self, of_machine: str | None, pid: int, timeout: float) -> None:
        self.ticks = 0
        self._pid = pid
        self.is_near = of_machine is not None and of_machine == machine()
        self._tick = timeout / 5
        self._busy = 0
        self._used: float | None = None

    def beat(self) -> None:
        """Reset the time: the process has sent something."""
        self.ticks = self._busy = 0
        self._used = None

    def tick(self) -> str | None:
        """Count a fifth of a timeout without a heartbeat; returns how the process has failed, or None."""
        self.ticks += 1
        if self.ticks < _LOOKED_AT:
            return None
        state = self._look() if self.is_near else ""
        if self.ticks >= 5 and state == "T":
            return f"it is stopped (by SIGSTOP, say) and has not answered for {self.ticks * self._tick:g} s"
        if self.ticks >= 5 and state == "gone":
            return DIED
        if self.ticks - self._busy < 5 * PATIENCE:
            return None
        idle = ", and is idle" if self.is_near else ""
        return f"it has not answered for {self.ticks * self._tick:g} s{idle}"

    def _look(self) -> str:
        state, used = activity(self._pid)
        if not state:
            return ""
        computed = 0.0 if self._used is None else used - self._used
        self._used = used
        self._busy += state == "R" or computed > _BUSY * self._tick
        return state

    def end_process(self) -> None:
        """Kill the process if it is a rank of this machine: it cannot receive a message."""
        if self.is_near and self._pid != os.getpid() and is_of_job(self._pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


def machine() -> str | None:
    """Return an identifier of this machine's pid namespace; None if it cannot be determined."""
    if sys.platform != "linux":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text(encoding='utf-8').strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def is_of_job(pid: int) -> bool:
    """Return whether a process has started this one, or was started by it or by its launcher.

    No other process may be sent a signal, whatever pid a message names.
    """
    if pid == os.getppid():
        return True
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(stat_of(pid)[1]) in (os.getpid(), os.getppid())
    return False


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name, which may contain anything; see proc(5).

    Raises:
        OSError: There is no such process, or no file descriptor.
    """
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def activity(pid: int) -> Activity:
    """Return the state of a process of this machine. Only a definite answer of the system is "gone"."""
    try:
        state, *numbers = stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return Activity("gone", 0.0)
    except OSError:
        return Activity("", 0.0)
    if state in "ZX":
        return Activity("gone", 0.0)
    used = int(numbers[10]) + int(numbers[11])  # utime and stime
    return Activity("T" if state == "t" else state, used / os.sysconf("SC_CLK_TCK"))


def is_gone(pid: int) -> bool:
    """Return whether there is certainly no process of this number on this machine."""
    if sys.platform == "linux":
        return activity(pid).state == "gone"
    if sys.platform != "win32":  # on Windows this call would end the process
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
    return False
