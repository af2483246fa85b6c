"""A worker that dies is heard of where its batches are read, and nowhere else.

The system tells of the end of a child by a signal, at which torch raises a RuntimeError in the main thread,
wherever that is: in the optimizer's constructor, in a forward pass, in a `try` of the user's that means
something else. Here it is kept until the reading of that worker's batches goes on, or raised at once where
somebody waits for them.
"""

from __future__ import annotations

import re
import signal
import threading
import weakref
from types import FrameType
from typing import Any

_ONE = re.compile(r"DataLoader worker \(pid (\d+)\)")

KEPT: dict[int, RuntimeError] = {}
"""What torch said of workers that nobody waited for, by process."""

_ours: dict[int, weakref.ref[Any]] = {}
"""The iterators over workers that are listened for, by id."""

_then: Any = None
"""The handler in whose place ours stands."""


class Waits:
    """For whose batch somebody waits; set for every batch, by an assignment that costs next to nothing."""

    iterator: Any = None


def listen(iterator: Any) -> None:
    """Keep what is raised when one of an iterator's workers ends, from now on."""
    global _then
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return  # torch does not listen either
    which = id(iterator)
    _ours[which] = weakref.ref(iterator, lambda _: _leave(which))
    handler = signal.getsignal(signal.SIGCHLD)
    if handler is not _heard and callable(handler):
        _then = handler
        signal.signal(signal.SIGCHLD, _heard)


def end(iterator: Any) -> None:
    """End an iterator's workers, also where something else, as a traceback does, still refers to it."""
    if iterator is None:
        return
    try:
        shut_down = getattr(iterator, "_shutdown_workers", None)  # what torch calls once nothing refers to it
        if shut_down is not None:
            shut_down()
    finally:
        for pid in _pids(iterator):
            KEPT.pop(pid, None)
        _leave(id(iterator))


def _leave(which: int) -> None:
    """Listen no longer, and put back the handler that was there if nothing else is listened for."""
    _ours.pop(which, None)
    is_main = threading.current_thread() is threading.main_thread()
    if not _ours and is_main and _then is not None and signal.getsignal(signal.SIGCHLD) is _heard:
        signal.signal(signal.SIGCHLD, _then)


def raise_kept(iterator: Any) -> None:
    """Raise what was kept of one of an iterator's workers.

    Raises:
        RuntimeError: torch's.
    """
    for pid in _pids(iterator):
        if pid in KEPT:
            raise KEPT.pop(pid)


def _pids(iterator: Any) -> list[int]:
    return [process.pid for process in getattr(iterator, "_workers", ())]


def _heard(number: int, frame: FrameType | None) -> None:
    try:
        _then(number, frame)
    except RuntimeError as error:
        found = _ONE.search(str(error))
        pid = int(found[1]) if found else -1
        waited_for = pid in _pids(Waits.iterator)
        if waited_for or not any(pid in _pids(each()) for each in list(_ours.values())):
            raise
        KEPT[pid] = error
