"""Messages of a process to its launcher: how it ends after its job has failed."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import NoReturn

from drivetrain.core.errors import shown
from drivetrain.distributed.threads import within

_WRITING = 1.0
"""Seconds that writing may take at the end."""

_NOTICED = 5
"""Seconds in which torch's agent notices that a process has ended; by default it looks ten times a second."""


def record(error: BaseException, is_first: bool = True) -> None:
    """Record an error for torchrun's summary, which otherwise has only an exit code.

    Args:
        is_first: Whether it is the job's first failure. torchrun takes the rank with the earliest time, in
            whole seconds, as the root cause, so the error of a rank that only ends because of another is
            recorded with a later time.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    from torch.distributed.elastic.multiprocessing import errors

    handler = errors.get_error_handler()
    if sys.exc_info()[1] is not None:
        handler.record_exception(error)
    else:
        try:
            raise error  # the recorder's stack is of the exception that is being handled
        except BaseException:
            handler.record_exception(error)
    if not is_first:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        extra = found["message"]["extraInfo"]
        extra["timestamp"] = str(int(extra["timestamp"]) + _NOTICED)
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def _record_last() -> None:
    """Record the error that ends the program, unless one was recorded before."""
    error, file = getattr(sys, "last_value", None), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if isinstance(error, BaseException) and file and not os.path.exists(file):
        record(error)


if "TORCHELASTIC_ERROR_FILE" in os.environ:
    atexit.register(_record_last)


def write_now(text: str) -> None:
    """Write to stderr from a thread that must not wait.

    It takes no lock of the stream, which a waiting thread may hold, and gives up after a second on a pipe
    that nobody reads.
    """
    within(_WRITING, lambda: _write(text), "drivetrain-last-words")  # whose stream may be closed


def _write(text: str) -> None:
    text, stream, plain = shown(text), sys.stderr, sys.__stderr__
    if plain is not None and stream is plain and sys.platform != "win32":
        os.write(plain.fileno(), text.encode(errors="replace"))  # without the stream's lock
    else:
        stream.write(text)
        stream.flush()


def end_now(code: int) -> NoReturn:
    """Flush the streams and exit this process at once, with an exit code.

    It does not wait for a stream that a thread holds, or whose pipe nobody reads.
    """
    within(_WRITING, _flush, "drivetrain-last-words")
    end_workers()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # so that one that fails does not keep back the other
            stream.flush()


def end_workers() -> None:
    """Kill the daemon processes that would end with this one in an orderly exit, such as a loader's workers.

    A worker that is stuck in a file system that does not answer would not notice that its parent is gone.
    """
    with contextlib.suppress(Exception):
        for each in multiprocessing.active_children():
            # A fork of a process still has the original's children on its list.
            if each.daemon and getattr(each, "_parent_pid", None) == os.getpid():
                each.kill()
