"""Processes of this machine that a rank has started: their environment, and how they end."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drivetrain.distributed.failure.heartbeat import is_gone
from drivetrain.distributed.interfaces import loopback_variables
from drivetrain.distributed.threads import Periodic

PARENT = "DRIVETRAIN_PARENT"
"""An environment variable of a rank that another rank has started: that one's pid."""

LAUNCHER = "DRIVETRAIN_LAUNCHER"
"""An environment variable of a process that `drivetrain launch` has started: its pid, and "main" if a
thread started it that lasts as long as the process, as a main thread does."""

FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
"""Signals that `drivetrain launch` itself sends to the ranks, which decide what to do."""

FAILURE = "failure.json"
"""The file in the log directory of a launch with the first failure: its "rank", "code" and "text"."""

_PR_SET_PDEATHSIG = 1
_LOOKING = 0.2
"""Seconds between two checks of whether the parent still runs."""

_LAST_WORDS = 20.0
"""Seconds that a process has to report its parent's death and to end by itself."""


_follows = False
_launcher = 0
_open_channels = 0


@dataclass(frozen=True, eq=False)
class Child:
    """A process that was started here.

    Attributes:
        poll: Returns its exit code, negative for a signal, or None while it runs.
    """

    rank: int
    pid: int
    poll: Callable[[], int | None]

    def end(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


started: dict[int, Child] = {}
"""The running ranks that this process has started, by rank."""


def wait_for(children: Iterable[Child], seconds: float) -> list[Child]:
    """Wait until all have ended; returns those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    running = [each for each in children if each.poll() is None]
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        running = [each for each in running if each.poll() is None]
    return running


def end_all(children: Iterable[Child], grace: float = 1.0) -> None:
    """End all that run: SIGTERM first, SIGKILL after `grace` seconds, or at once with 0."""
    children = list(children)
    if grace:
        for each in children:
            each.end(signal.SIGTERM)
    for each in wait_for(children, grace):
        each.end(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    wait_for(children, 5.0)


def say(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()


def ending(code: int) -> str:
    """Return how a process ended, as a phrase that follows its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def environment_of(rank: int, world_size: int, port: int, threads: int | None) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank of a job on this machine alone.

    In addition they keep the ranks' connections on the loopback interface.

    Args:
        threads: The number of threads of each rank; None keeps the user's setting.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        **loopback_variables(),
    }


def threads_per_rank(world_size: int, environment: Mapping[str, str]) -> int | None:
    """Return an equal share of the cores that this process may use; None if the user has set a number."""
    if "OMP_NUM_THREADS" in environment:
        return None
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // world_size)


def children_of(pid: int) -> list[int]:
    """Return the running children of a process of this machine; empty on Windows."""
    tasks = Path(f"/proc/{pid}/task")
    if sys.platform == "linux":
        with suppress(OSError):
            return [
                int(each)
                for task in tasks.iterdir()
                for each in (task / "children").read_text("ascii").split()
            ]
        return []
    if sys.platform == "win32":
        return []
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def parent_mark(lasts: bool = False) -> str:
    """Return the value of `LAUNCHER` for a process that is started now.

    Args:
        lasts: Whether this thread, if it is not the main one, ends only after that process.
    """
    is_main = lasts or threading.current_thread() is threading.main_thread()
    return f"{os.getpid()} {'main' if is_main else 'thread'}"


def end_with_parent(parent: int, folder: str = "") -> None:
    """End this process when its parent has died, however that ended; a call that keeps the interpreter's lock
    ends first.

    Does nothing in a process that has only inherited the number from its own parent. On Windows, where a
    process does not learn of its parent's end, only the failure channel does.

    Args:
        parent: Its pid.
        folder: A folder that the parent would have removed; "" for none.
    """
    if sys.platform == "win32":
        return
    if os.getppid() == parent:
        _look_after(parent, _LAST_WORDS, folder)
    elif is_gone(parent):
        os._exit(1)


def _look_after(parent: int, last_words: float = 0.0, folder: str = "") -> None:
    def look() -> None:
        if os.getppid() != parent:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            if _open_channels:
                time.sleep(last_words)
            os._exit(1)

    Periodic(look, _LOOKING, "drivetrain-parent")


def count_channel(change: int) -> None:
    """Count the failure channels that are open in this process, and so report the end of its parent."""
    global _open_channels
    _open_channels += change


def end_with_launcher() -> None:
    """Kill this process when its launcher dies for any reason, on Linux and macOS.

    Without its launcher nothing else would end the process, and a restarted job writes to the same directory.
    The process ends at once, without the grace period of `end_with_parent`. Nothing happens on a second call,
    or if the process was started by neither `drivetrain launch` nor torchrun.
    """
    global _follows, _launcher
    if _follows or sys.platform == "win32":
        return
    _follows = True
    mark = os.environ.pop(LAUNCHER, None)  # not for this process's own children, which may outlive it
    if mark is None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _look_after(os.getppid())
        return
    number, thread = mark.split()
    launcher = int(number)
    if os.getppid() == launcher:
        _launcher = launcher
        if thread == "main":
            end_with(launcher)
        _look_after(launcher)
    elif is_gone(launcher):
        say(f"`drivetrain launch` (pid {launcher}) is gone, and this process ends")
        os._exit(1)


def siblings() -> list[int]:
    """Return the running ranks of this machine, with this one, if `drivetrain launch` has started them."""
    return children_of(_launcher) if _launcher and sys.platform == "linux" else []


def end_with(parent: int) -> None:
    """Have Linux kill this process when the parent, which started it in its main thread, has died.

    Args:
        parent: The parent's pid; does nothing if another process has started this one.
    """
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has died in between
            os._exit(1)
