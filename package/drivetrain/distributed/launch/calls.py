"""Calls of functions in new processes of this machine, with their results or the causes of their failures."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from drivetrain.core.errors import StrategyError, shown
from drivetrain.distributed.failure.messages import Cause, shortened
from drivetrain.distributed.launch.children import Child, end_with_parent, ending, started

_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
"""Fork saves the seconds that a spawned process takes to import torch, but is safe only on Linux."""

_LOOKING = 0.02
"""Seconds between two checks of the processes."""

_LONGEST = 5_000
"""Characters of a message: with a traceback they fit into a pipe that is not read yet."""


class Call:
    """A call of a function in a new process, which ends with this one.

    The process reads nothing from standard input and runs no exit handlers. Its result is pickled, with
    copies of the tensors.

    Args:
        function: Takes no arguments. It is pickled if the process is spawned.
        rank: The number of the process in the cause of a failure.
        method: "fork" or "spawn".

    Attributes:
        child: The process.
        value: What the function has returned.
        cause: Why the call has failed: the error, with its whole traceback, or how the process ended. None if
            it has not failed.
        moment: The time of the end on `monotonic`'s clock, which all processes of a machine share.

    Raises:
        StrategyError: This process cannot start others.
    """

    def __init__(self, function: Callable[[], Any], rank: int = 0, *, method: str = _START_METHOD) -> None:
        if multiprocessing.current_process().daemon:
            raise StrategyError(
                "this process is daemonic, as a worker of multiprocessing.Pool is, and so it cannot start"
                " processes. Use concurrent.futures.ProcessPoolExecutor, whose workers can"
            )
        context: Any = multiprocessing.get_context(method)
        self._pipe, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(function, rank, sender, os.getpid()))
        with warnings.catch_warnings(), without_garbage_collection(), sender:
            # Python warns of forking a process with threads. The fork uses no lock that they may hold.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            process.start()
        self._process = process
        self.child = Child(rank, process.pid, lambda: process.exitcode)
        self.value: Any = None
        self.cause: Cause | None = None
        self.moment: float | None = None

    def has_ended(self) -> bool:
        """Return whether the call has ended; read its value or its cause when it has."""
        if self.moment is None:
            code = self.child.poll()  # first: a process that has ended has sent all that it had to
            try:
                if self._pipe.poll():
                    self.moment, self.value, self.cause = pickle.loads(self._pipe.recv_bytes())
                    return True
            except (EOFError, OSError):  # it was killed, perhaps while it sent
                pass
            if code is not None:
                # A kill is a cause. An exit without an error probably follows from another's failure.
                self.moment = 0.0 if code < 0 else math.inf
                self.cause = Cause("lost", self.child.rank, "", f"it {ending(code)}")
        return self.moment is not None

    @property
    def error(self) -> tuple[str, str]:
        """The name of the error's class, and its message, of a call that has failed by an error."""
        assert self.cause is not None
        kind, _, text = self.cause.what.partition(": ")
        return kind.rpartition(".")[2], text

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def wait_for_calls(calls: Sequence[Call], seconds: float, grace: float = 0.0) -> list[Call]:
    """Wait until all calls have ended, and return those that still run after a time.

    Args:
        seconds: The time limit.
        grace: Seconds from the first failure until the others need not be waited for.
    """
    deadline, has_failed = time.monotonic() + seconds, False
    while running := [each for each in calls if not each.has_ended()]:
        if not has_failed and first_cause(calls) is not None:
            has_failed, deadline = True, min(deadline, time.monotonic() + grace)
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOKING)
    return running


def first_cause(calls: Sequence[Call]) -> Cause | None:
    """Return the cause that explains the failures of the other calls; None if none has failed."""
    failed = [each for each in calls if each.cause is not None]
    return min(failed, key=_order).cause if failed else None


def _order(failed: Call) -> tuple[int, float]:
    assert failed.cause is not None
    assert failed.moment is not None
    return ("error", "lost", "consequence").index(failed.cause.kind), failed.moment


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Run the block, which forks, so that the fork collects no garbage that it inherits.

    The destructor of an earlier run's leftovers, such as a process group in a traceback, would wait for
    threads that a fork does not have.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def resume_garbage_collection() -> None:
    """Collect garbage in a fork made under `without_garbage_collection`, except inherited objects."""
    gc.freeze()
    gc.enable()


def _answer(function: Callable[[], Any], rank: int, sender: Connection, parent: int) -> NoReturn:
    # The process ends here, whatever happens: the rest of the program is for the original.
    code = 1
    try:
        resume_garbage_collection()
        nothing = os.open(os.devnull, os.O_RDONLY)  # standard input is the original's
        os.dup2(nothing, 0)
        os.close(nothing)
        started.clear()
        end_with_parent(parent)
        value = function()
        answer = pickle.dumps((time.monotonic(), value, None))
        code = 0
    except BaseException as error:
        moment, cause = time.monotonic(), Cause.of_error(rank, "", error)
        frames = shortened(shown("".join(traceback.format_exception(error))))
        answer = pickle.dumps((moment, None, replace(cause, what=cause.what[:_LONGEST], frames=frames)))
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        sender.send_bytes(answer)
    finally:
        os._exit(code)
