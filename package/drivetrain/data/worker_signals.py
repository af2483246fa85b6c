"""What signals do to workers, and their ends to us.

Those that end a run in order do nothing to its workers, whose batches it still needs, however many processes
they are sent to. A worker that dies is heard of where its batches are read, and nowhere else.

The system tells of the end of a child by a signal, at which torch raises a RuntimeError in the main thread,
wherever that is: in the optimizer's constructor, in a forward pass, in a `try` of the user's that means
something else, in what tells the other ranks of an error. Here it is kept until the reading of that worker's
batches goes on, or raised at once where somebody waits for them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import re
import selectors
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, forkserver, queues
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, dataloader

from drivetrain.data.worker_ends import workers_of
from drivetrain.distributed.signals import handled, held_back, unmoved

_ONE = re.compile(r"DataLoader worker \(pid (\d+)\)")

KEPT: dict[int, RuntimeError] = {}
"""What torch said of workers that nobody waited for, by process."""

_ours: dict[int, tuple[weakref.ref[Any], list[int]]] = {}
"""The iterators over workers that are listened for, and the workers' processes, by id."""

_telling = 0
"""How many errors are told just now, none of which another one may break in upon."""

_then: Any = None
"""The handler in whose place ours stands."""


_exits: Finalize | None = None
"""What ends workers with the program that signals no longer do."""


class Spared:
    """A `worker_init_fn` by which the signals of now do nothing in a worker, before the user's own, whose
    handlers count.

    To be made where the workers are started, which is done under `starting`.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then
        self.numbers = handled()
        self.starter = os.getpid()

    def __call__(self, worker: int) -> None:
        if os.getpid() != self.starter:  # and is no thread
            unmoved(self.numbers)
        if self.then is not None:
            self.then(worker)


def start_server(loader: Any) -> None:
    """Start the process that a loader's workers are forked from, if there is to be one: started where signals
    are held back, it would hold them back from all that it ever forks.
    """
    context = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "forkserver":
        forkserver.ensure_running()


@contextmanager
def starting() -> Iterator[None]:
    """Start workers: hold signals back, and keep the garbage of this process from being collected in theirs.

    A forked worker has a copy of the garbage, but of no thread other than the one that forked. The destructor
    of a process group in that garbage waits for threads, so that a worker that collected it would hang.
    """
    gc.freeze()  # which a forked process keeps
    try:
        with held_back():
            yield
    finally:
        gc.unfreeze()  # also what the user has frozen, which is then collected as any other object


@contextmanager
def sparing(data: Any) -> Iterator[None]:
    """Iterate over a user's data; the workers of a loader are spared the signals of now."""
    if not isinstance(data, DataLoader) or not data.num_workers:
        yield
        return
    start_server(data)
    own = data.worker_init_fn
    if handled():
        data.worker_init_fn = Spared(own)
    try:
        with starting():
            yield
    finally:
        data.worker_init_fn = own


def end_by_kill(iterator: Any) -> None:
    """Have torch kill those of an iterator's workers that do not end by themselves: it asks by SIGTERM."""
    global _exits
    if not handled():
        return
    for each in workers_of(iterator):
        if each.pid is not None:
            each.terminate = partial(os.kill, each.pid, signal.SIGKILL)  # type: ignore[method-assign]
    if _exits is None or not _exits.still_active():
        _exits = Finalize(None, _end_with_program, exitpriority=0)


def _end_with_program() -> None:
    """Before multiprocessing sends SIGTERM to what is left at the end of a program, and waits for it."""
    for each in multiprocessing.active_children():
        if "terminate" in vars(each):
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise at this end
            each.terminate()


class Waits:
    """For whose batch somebody waits; set for every batch, by an assignment that costs next to nothing."""

    iterator: Any = None


def listen(iterator: Any) -> None:
    """Keep what is raised when one of an iterator's workers ends, from now on."""
    if not _hears():
        return
    which = id(iterator)
    _ours[which] = weakref.ref(iterator, lambda _: _leave(which)), _pids(iterator)
    _take_over()


class Telling:
    """From `begin` on until it is left, what is raised when any worker ends breaks in upon nothing: an error
    is told already.
    """

    def __init__(self) -> None:
        self._has_begun = False

    def __enter__(self) -> Telling:
        return self

    def begin(self) -> None:
        """An error is told from here on."""
        global _telling
        if not _hears() or self._has_begun:
            return
        self._has_begun = True
        _telling += 1
        with suppress(RuntimeError):  # what has come meanwhile
            _take_over()
        _take_over()

    def __exit__(self, *_: object) -> None:
        global _telling
        if self._has_begun:
            self._has_begun = False
            _telling -= 1
            _put_back()


def _hears() -> bool:
    """Whether torch would raise here."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")


def _take_over() -> None:
    global _then
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
        unlisten(iterator)


def unlisten(iterator: Any) -> None:
    """Undo `listen`, and forget what was kept."""
    _leave(id(iterator))


def _leave(which: int) -> None:
    """Listen no longer, and put back the handler that was there if nothing else is listened for."""
    _, pids = _ours.pop(which, (None, ()))
    for pid in pids:
        KEPT.pop(pid, None)
    _put_back()


def _put_back() -> None:
    is_needed = _ours or _telling or _then is None
    if not is_needed and _hears() and signal.getsignal(signal.SIGCHLD) is _heard:
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
    return [process.pid for process in workers_of(iterator) if process.pid is not None]


def _heard(number: int, frame: FrameType | None) -> None:
    try:
        _then(number, frame)
    except RuntimeError as error:
        found = _ONE.search(str(error))
        pid = int(found[1]) if found else -1
        is_ours = any(pid in pids for _, pids in list(_ours.values()))
        waited_for = pid in _pids(Waits.iterator) and _only_waits(frame)
        if not (_telling and found) and (waited_for or not is_ours):
            raise
        if is_ours:
            KEPT[pid] = error


_WAITING = frozenset(each.__file__ for each in (selectors, threading, queue, queues, connection))


def _only_waits(frame: FrameType | None) -> bool:
    """Whether torch's iterator does nothing but wait for a batch.

    Amid other work, as in a callback of the garbage collector, an error would be lost or leave a file open.
    What is kept there costs little: torch looks for itself every five seconds of a wait.
    """
    while frame is not None and frame.f_code.co_filename in _WAITING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == dataloader.__file__
