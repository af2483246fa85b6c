"""What a process tells its launcher: that it trains, and how it ends when its job has failed."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_WRITING = 1.0
"""Seconds that last words may take."""

TRAINING = "training"
"""A file beside the one for errors, which torch's agent gives each process that it starts."""


def tell_training() -> None:
    """Tell torch's agent, if that has started this process, that the set-up is done."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with contextlib.suppress(OSError):  # only a report hangs on it
            Path(file).with_name(TRAINING).touch()


def record(error: BaseException) -> None:
    """For the summary of torchrun, which otherwise knows no more than an exit code."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing import errors

        errors.get_error_handler().record_exception(error)


def _record_last() -> None:
    """At the end of a program: the error that it has ended with, if nothing was recorded of it before."""
    error, file = getattr(sys, "last_value", None), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if isinstance(error, BaseException) and file and not os.path.exists(file):
        try:
            raise error  # what records it looks at what is being handled
        except BaseException:
            record(error)


if "TORCHELASTIC_ERROR_FILE" in os.environ:
    atexit.register(_record_last)


def write_now(text: str) -> None:
    """Write to stderr from a thread that must not wait: neither for its lock, which a thread that waits
    itself may hold, nor for a pipe that nobody reads. After a second it is left to be written, or not.
    """
    _not_for_long(lambda: _write(text))


def _write(text: str) -> None:
    stream, plain = sys.stderr, sys.__stderr__
    if plain is not None and stream is plain and sys.platform != "win32":
        os.write(plain.fileno(), text.encode(errors="replace"))  # past the lock
    else:
        stream.write(text)
        stream.flush()


def end_now(code: int) -> NoReturn:
    """End this process at once, with an exit code, after what it has written so far; a stream that a thread
    holds, or whose pipe nobody reads, is not waited for.
    """
    _not_for_long(_flush)
    end_workers()
    os._exit(code)


def _not_for_long(act: Callable[[], None]) -> None:
    """Do something that may wait for ever, in a thread, and go on after a moment."""

    def try_it() -> None:
        with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
            act()

    thread = threading.Thread(target=try_it, name="drivetrain-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends already
        try_it()
    else:
        thread.join(_WRITING)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # each by itself
            stream.flush()


def end_workers() -> None:
    """End the processes that would end with this one if it ended in order: a loader's workers among them.

    A worker that is stuck, in a file system that does not answer, does not notice that its parent is gone.
    """
    with contextlib.suppress(Exception):
        for each in multiprocessing.active_children():
            # A copy of a process, made by a fork, still has its parent's on its list.
            if each.daemon and getattr(each, "_parent_pid", None) == os.getpid():
                each.kill()
