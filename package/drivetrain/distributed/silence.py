"""Whether a process that says nothing is still to be waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

PATIENCE = 12
"""So many timeouts a process may be silent that does nothing, or cannot be seen."""

ABOVE = "what it had to say stands above"
"""Where a process may have told more, on standard error."""

DIED = f"it was killed, perhaps for want of memory, or ended by os._exit, or aborted ({ABOVE})"
"""What can be said of a process that this one has not started."""

_LOOKED_AT = 3
"""Ticks of silence from which on it is looked at what the process does."""

_BUSY = 0.03
"""The share of a core that a process which does nothing may use."""


class Activity(NamedTuple):
    """The state of a process, and the seconds of a core that it has used.

    The state is the letter that Linux has for its main thread, "R" for one that runs, "S" for one that
    sleeps, "D" for one that waits for a disk, "T" for a stopped one; or "gone". It is empty where the process
    could not be looked at, for want of a file descriptor say.
    """

    state: str
    used: float


class Silence:
    """How long another process has said nothing, in fifths of a timeout, and whether it has failed.

    A process that is stopped or gone has failed after one timeout. While a call holds the interpreter, such
    as one of a library that computes or reads a large file, none of its threads can send anything: where a
    process can be seen, on the same machine and Linux, one that runs is waited for as long as it takes. One
    that does nothing, or cannot be seen, has `PATIENCE` timeouts.

    It goes by calls of `tick`, not by the clock: while this process is itself suspended, nobody is silent.

    Args:
        of_machine: Where the process runs, as `machine` names it.
        pid: Its number there.
        timeout: In seconds.

    Attributes:
        ticks: How many have passed since the process was last heard.
        is_near: Whether the process is of this machine, and can be seen.
    """

    def __init__(self, of_machine: str | None, pid: int, timeout: float) -> None:
        self.ticks = 0
        self._pid = pid
        self.is_near = of_machine is not None and of_machine == machine()
        self._tick = timeout / 5
        self._busy = 0
        self._used: float | None = None

    def end(self) -> None:
        """It was heard."""
        self.ticks = self._busy = 0
        self._used = None

    def tick(self) -> str | None:
        """A fifth of a timeout has passed without a word; returns how the process has failed, None if not."""
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
        idle = ", and does nothing" if self.is_near else ""
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
        """End the process, if it is one of this machine: it cannot hear that it should."""
        if self.is_near and self._pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


def machine() -> str | None:
    """This machine, as the number of a process is known in; None where that cannot be told."""
    if sys.platform != "linux":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text(encoding='utf-8').strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def activity(pid: int) -> Activity:
    """Return the state of a process of this machine. Only the system's word that there is none is "gone"."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return Activity("gone", 0.0)
    except OSError:
        return Activity("", 0.0)
    state, *numbers = text.rpartition(")")[2].split()  # behind its name, which may be anything
    if state in "ZX":
        return Activity("gone", 0.0)
    used = int(numbers[10]) + int(numbers[11])  # utime and stime
    return Activity("T" if state == "t" else state, used / os.sysconf("SC_CLK_TCK"))
