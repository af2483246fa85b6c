"""Workers that signals spare, and the reports of their ends.

Signals that end a run in order do nothing to its workers, whose batches the run still needs, however many
processes they are sent to.

The system reports the end of a child by SIGCHLD. torch then raises a RuntimeError in the main thread,
wherever that is: in the optimizer's constructor, in a `try` of the user's for something else, in the report
of another error. While our workers run, that error is raised only where torch waits for a batch. Elsewhere it
is put aside until the next batch is asked for.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import selectors
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, forkserver, queues
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, dataloader

from drivetrain.data.worker_ends import workers_of
from drivetrain.distributed.signals import handled, held_back, unmoved

_running: dict[int, weakref.ref[Any]] = {}
"""The iterators whose workers run, by id."""

aside: list[RuntimeError] = []
"""Errors of dead workers that came while nobody waited for a batch."""

_torchs: Any = None
"""The handler in whose place ours stands."""


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


@contextmanager
def starting(loader: Any) -> Iterator[None]:
    """Start a loader's workers: hold signals back, and keep the garbage of this process from being collected
    in the workers.

    A forked worker has a copy of the garbage, but of no thread other than the one that forked. The destructor
    of a process group in that garbage waits for threads, so that a worker that collected it would hang.
    """
    context = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "forkserver":
        forkserver.ensure_running()  # before signals are held back, or all that it ever forks would hold them
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
    own = data.worker_init_fn
    if handled():
        data.worker_init_fn = Spared(own)
    try:
        with starting(data):
            yield
    finally:
        data.worker_init_fn = own


def begun(iterator: Any) -> None:
    """Take care of an iterator's workers, until they end or nothing refers to the iterator any more."""
    global _torchs
    if handled():
        for each in workers_of(iterator):
            if each.pid is not None:  # torch asks those that do not end by SIGTERM, which they are spared
                each.terminate = partial(os.kill, each.pid, signal.SIGKILL)  # type: ignore[method-assign]
    if not _is_told():
        return
    which = id(iterator)
    _running[which] = weakref.ref(iterator, lambda _: _leave(which))
    handler = signal.getsignal(signal.SIGCHLD)
    if handler is not _child_ended and callable(handler):
        _torchs = handler
        signal.signal(signal.SIGCHLD, _child_ended)


def end(iterator: Any) -> None:
    """End an iterator's workers, also where something else, as a traceback does, still refers to it."""
    if iterator is None:
        return
    try:
        shut_down = getattr(iterator, "_shutdown_workers", None)  # what torch calls once nothing refers to it
        if shut_down is not None:
            shut_down()
    finally:
        _leave(id(iterator))


def _leave(which: int) -> None:
    """Put back torch's handler, if no other workers run."""
    _running.pop(which, None)
    if not _running:
        aside.clear()
    if not _running and _is_told() and signal.getsignal(signal.SIGCHLD) is _child_ended:
        signal.signal(signal.SIGCHLD, _torchs)


def _is_told() -> bool:
    """Whether torch would raise here."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")


def _child_ended(number: int, frame: FrameType | None) -> None:
    try:
        _torchs(number, frame)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) or _only_waits(frame):
            raise
        aside.append(error)


_WAITING = frozenset(each.__file__ for each in (selectors, threading, queue, queues, connection))


def _only_waits(frame: FrameType | None) -> bool:
    """Whether torch's iterator does nothing but wait for a batch.

    Amid other work, as in a callback of the garbage collector, an error would be lost or leave a file open.
    """
    while frame is not None and frame.f_code.co_filename in _WAITING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == dataloader.__file__
