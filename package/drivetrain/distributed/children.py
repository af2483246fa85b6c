"""Processes of this machine that a rank has started: what they find in their environment, how they end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from drivetrain.distributed.silence import activity

PARENT = "DRIVETRAIN_PARENT"
"""In a started process's environment: the process that started it, and "main" if its main thread did."""

LAUNCHER = "DRIVETRAIN_LAUNCHER"
"""The same, in a process that `drivetrain launch` has started."""

_PR_SET_PDEATHSIG = 1
_LOOKING = 0.2
"""Seconds between two looks at whether the parent is still there."""

_LAST_WORDS = 5.0
"""Seconds that a process has to say that its parent has died, and to end by itself."""


_TORCHRUN = re.compile(rb"(^|/)torchrun\0|\0-m\0torch\.distributed\.(run|launch)\0")
"""In the command of a process that is torch's own launcher."""

_dies_at_once = False
_follows = False


class Child:
    """A process that was started here.

    Args:
        rank: Which rank it is.
        pid: Its number in the system.
        poll: Gives its exit code, negative for a signal, or None while it runs.
    """

    def __init__(self, rank: int, pid: int, poll: Callable[[], int | None]) -> None:
        self.rank = rank
        self.pid = pid
        self.poll = poll

    def end(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


started: dict[int, Child] = {}
"""The ranks that this process has started, while they are its concern."""


def wait_for(children: Iterable[Child], seconds: float) -> list[Child]:
    """Wait until all have ended; returns those that have not after so many seconds."""
    deadline = time.monotonic() + seconds
    running = [each for each in children if each.poll() is None]
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        running = [each for each in running if each.poll() is None]
    return running


def end_all(children: Iterable[Child], grace: float = 1.0) -> None:
    """End all that run: asked first, killed after `grace` seconds, or at once with 0."""
    children = list(children)
    if grace:
        for each in children:
            each.end(signal.SIGTERM)
    for each in wait_for(children, grace):
        each.end(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    wait_for(children, 5.0)


def ending(code: int) -> str:
    """How a process ended, in words that follow its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def environment_of(rank: int, world_size: int, port: int, threads: int | None) -> dict[str, str]:
    """The variables that torchrun would set for a rank of a job on this machine alone.

    Args:
        rank: Which.
        world_size: Of how many.
        port: Where rank 0 will listen.
        threads: How many threads each uses; None leaves what the user has set.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
    }


def threads_per_rank(world_size: int, environment: Mapping[str, str]) -> int | None:
    """A fair share of the cores that this process may use; None when the user has said how many."""
    if "OMP_NUM_THREADS" in environment:
        return None
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // world_size)


def children_of(pid: int) -> list[int]:
    """The processes that a process of this machine has started, and that have not ended; not on Windows."""
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


def parent_mark() -> str:
    """What a process that is started now finds under `PARENT`."""
    is_main = threading.current_thread() is threading.main_thread()
    return f"{os.getpid()} {'main' if is_main else 'thread'}"


def end_with_parent(mark: str) -> None:
    """End this process when the one that started it has died, however it died.

    Nothing happens in a process that another one has started, and that has only inherited the mark. On
    Windows, where a process does not learn of its parent's end, the failure channel alone tells.

    Args:
        mark: What was found under `PARENT`.
    """
    global _dies_at_once
    number, thread = mark.split()
    parent = int(number)
    if sys.platform == "win32":
        return
    if os.getppid() != parent:
        if not _is_alive(parent):
            os._exit(1)
        return
    if sys.platform == "linux" and thread == "main":
        # The system's own way needs no thread to run here. It goes by the thread that started this process,
        # so only the main one, which lives as long as its process, may be trusted with it.
        _dies_at_once = True
        outlive_parent(False)
    _look_after(parent, _LAST_WORDS)


def _look_after(parent: int, last_words: float) -> None:
    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKING)
        time.sleep(last_words)
        os._exit(1)

    threading.Thread(target=look, name="drivetrain-parent", daemon=True).start()


def end_with_launcher() -> None:
    """End this process when the launcher that has started it has died, however it died; on Linux and macOS.

    Nobody would be left to end it or to count it as running, and a job that is started anew writes to the
    same directory. So it ends at once, without the moment that `end_with_parent` leaves for last words.
    Called again, or in a process that neither `drivetrain launch` nor torchrun has started itself, it does
    nothing.
    """
    global _follows
    if _follows or sys.platform == "win32":
        return
    _follows = True
    mark = os.environ.pop(LAUNCHER, None)  # not for what this process starts, which may outlive it
    if mark is None:
        if "TORCHELASTIC_RUN_ID" in os.environ and _is_torchrun(os.getppid()):
            _look_after(os.getppid(), 0.0)
        return
    number, thread = mark.split()
    launcher = int(number)
    if os.getppid() == launcher:
        if thread == "main":
            end_with(launcher)
        _look_after(launcher, 0.0)
    elif not _is_alive(launcher):
        sys.stderr.write(f"drivetrain: `drivetrain launch` (pid {launcher}) is gone, and this process ends\n")
        os._exit(1)


def _is_torchrun(pid: int) -> bool:
    with suppress(OSError):  # no Linux, or gone
        return _TORCHRUN.search(Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False


def outlive_parent(is_allowed: bool) -> None:
    """Whether this process may outlive its parent for a few seconds, to say what has happened.

    To be called by the thread that has called `end_with_parent`; without effect in other processes.
    """
    if sys.platform == "linux" and _dies_at_once:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0 if is_allowed else signal.SIGKILL, 0, 0, 0)


def end_with(parent: int) -> None:
    """Have the system end this process when the one that started it, in its main thread, has died; on Linux.

    Args:
        parent: That process; nothing happens if another one has started this.
    """
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has died in between
            os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, who has got the number since
        return False
    # One that nobody has asked for its exit code yet can still be sent signals.
    return sys.platform != "linux" or activity(pid).state != "gone"
