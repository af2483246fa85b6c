"""Workers ignore the signals that end a run, and a dead worker is found where a batch is awaited.

Signals that end a run in order do nothing in its workers, because the run still needs their batches, however
many processes the signals are sent to.

The system reports the end of a child by SIGCHLD. torch then raises a RuntimeError in the main thread,
wherever that is: in the optimizer's constructor, in the user's `try` for something else, in the report of
another error. While our workers run, that error is dropped: torch also looks for dead workers every five
seconds while it waits for a batch, or after the loader's timeout.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from drivetrain.data.workers.ends import workers_of
from drivetrain.distributed.launch.children import end_with
from drivetrain.distributed.signals import handled, ignore_signals, signals_blocked

_running: dict[int, weakref.ref[Any]] = {}
"""The iterators whose workers run, by id."""

_torch_handler: Any = None
"""torch's SIGCHLD handler, which ours replaces."""


class IgnoreSignals:
    """A `worker_init_fn` that makes the handled signals do nothing in a worker, then calls the user's.

    Handlers that the user's function sets take precedence. Make it where the workers are started, under
    `starting`.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then
        self.numbers = handled()
        self.starter = os.getpid()
        # Linux watches the thread that has started a process.
        self.is_main = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if os.getpid() != self.starter:  # a process, not a thread
            ignore_signals(self.numbers)
            if self.is_main:
                end_with(self.starter)  # a stuck worker would not notice the end of its parent
        if self.then is not None:
            self.then(worker)


@contextmanager
def starting(loader: Any) -> Iterator[None]:
    """Run the block, which starts a loader's workers, with signals held back and garbage collection safe.

    A forked worker has a copy of this process's garbage, but only the thread that forked. The destructor of a
    process group in that garbage waits for its threads, so a worker that collected it would hang. Frozen
    objects are not collected there.
    """
    context = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "forkserver":
        forkserver.ensure_running()  # now, or all its forks would have the signals blocked
    gc.freeze()  # a forked process stays frozen
    try:
        with signals_blocked():
            yield
    finally:
        gc.unfreeze()  # including what the user has frozen, which is then collected like any other object


@contextmanager
def workers_ignoring_signals(data: Any) -> Iterator[None]:
    """Run the block, which iterates over a user's data; a loader's workers ignore the handled signals."""
    if not isinstance(data, DataLoader) or not data.num_workers:
        yield
        return
    own = data.worker_init_fn
    if handled():
        data.worker_init_fn = IgnoreSignals(own)
    try:
        with starting(data):
            yield
    finally:
        data.worker_init_fn = own


def expect_deaths(iterator: Any) -> None:
    """Prepare this process for the end of an iterator's workers, by whatever signal."""
    global _torch_handler
    if handled():
        for each in workers_of(iterator):
            if each.pid is not None:  # torch ends slow ones by SIGTERM, which they now ignore
                each.terminate = partial(os.kill, each.pid, signal.SIGKILL)  # type: ignore[method-assign]
    if not _gets_sigchld():
        return
    which = id(iterator)
    _running[which] = weakref.ref(iterator, lambda _: _leave(which))
    handler = signal.getsignal(signal.SIGCHLD)
    if handler is not _handle_sigchld and callable(handler):
        _torch_handler = handler
        signal.signal(signal.SIGCHLD, _handle_sigchld)


def end(iterator: Any) -> None:
    """End an iterator's workers, even if something else, such as a traceback, still refers to it."""
    try:
        shut_down = getattr(iterator, "_shutdown_workers", None)  # torch calls it in the iterator's __del__
        if shut_down is not None:
            shut_down()
    finally:
        _leave(id(iterator))


def _leave(which: int) -> None:
    """Restore torch's handler once the workers of all iterators have ended."""
    _running.pop(which, None)
    if not _running and _gets_sigchld() and signal.getsignal(signal.SIGCHLD) is _handle_sigchld:
        signal.signal(signal.SIGCHLD, _torch_handler)


def _gets_sigchld() -> bool:
    """Return whether torch raises in this thread."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")


def _handle_sigchld(number: int, frame: FrameType | None) -> None:
    with suppress(RuntimeError):
        _torch_handler(number, frame)
