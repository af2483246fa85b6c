"""The time limit without progress, and a watchdog that enforces it in a run of one process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

from drivetrain.core.errors import RankFailure
from drivetrain.distributed.failure import messages as failure_wire
from drivetrain.distributed.failure.last_words import end_workers, record, write_now
from drivetrain.distributed.failure.location import Phase
from drivetrain.distributed.failure.stack_files import write_stacks
from drivetrain.distributed.threads import Periodic

EXIT_HANG = 75
"""The exit code of a process that was killed because it hung; `EX_TEMPFAIL` of sysexits.h: try again."""

_WRITING = 10.0
"""Seconds that writing the stacks may take."""


class ProgressTimeout:
    """The time without any progress, in the caller's ticks, and its limit.

    Args:
        opaque: Seconds more for `Phase.OPAQUE`, which shows no progress until it is done.
    """

    def __init__(self, limit: float, opaque: float) -> None:
        self._limit = limit
        self._opaque = opaque
        self.end()

    def end(self) -> None:
        """Reset the time: there was progress."""
        self._seconds = self._seconds_unseen = 0.0

    @property
    def is_suspicious(self) -> bool:
        """Whether half of the limit has passed without progress."""
        return self._seconds + self._seconds_unseen >= self._limit / 2

    def add(self, seconds: float, phases: Iterable[Phase]) -> bool:
        """Add time without progress; returns whether it is over the limit.

        The longer limit counts while a rank compiles, saves or loads. No limit counts while all ranks are in
        the body of the program's own loop.
        """
        phases = set(phases)
        if Phase.OPAQUE in phases:
            self._seconds_unseen += seconds
        elif phases != {Phase.OUTSIDE}:
            self._seconds += seconds
        # The sum of ten tenths of a second is a little less than a second.
        slack = 1e-6 * self._limit
        total = self._seconds + self._seconds_unseen
        return self._seconds >= self._limit - slack or total >= self._limit + self._opaque - slack


class Watchdog:
    """Kills the process when `progress` returns the same value for longer than `timeout`.

    A thread asks a few times per timeout, so the step itself pays nothing. On expiry the stacks of all
    threads go to standard error and to `hang-stacks.txt` in `directory`, and the process exits with
    `EXIT_HANG` without unwinding: a main thread that is stuck in a system call or a kernel cannot be
    interrupted. A suspended process, as by closing a laptop's lid, does not count as hung.
    """

    def __init__(
        self,
        timeout: float,
        progress: Callable[[], Hashable],
        describe: Callable[[], str],
        directory: Path | None = None,
        phase: Callable[[], Phase] = lambda: Phase.WORKS,
    ) -> None:
        self._timeout = timeout
        self._progress = progress
        self._describe = describe
        self._directory = directory
        self._phase = phase
        self._limit = ProgressTimeout(timeout, failure_wire.TIMING.opaque)
        self._last: Hashable = None
        self._thread: Periodic | None = None

    def __enter__(self) -> Watchdog:
        tick = self._timeout / 10
        self._last = self._progress()
        self._thread = Periodic(lambda: self._watch(tick), tick, "drivetrain-watchdog")
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.stop()

    def _watch(self, tick: float) -> None:
        if self._is_hang(tick):
            self._expire()

    def _is_hang(self, seconds: float) -> bool:
        """Look again after so many seconds; returns whether the time without progress is over the limit."""
        last, self._last = self._last, self._progress()
        if self._last != last:
            self._limit.end()
            return False
        return self._limit.add(seconds, [self._phase() if self._limit.is_suspicious else Phase.WORKS])

    def _expire(self) -> None:
        # The run may hang on the very pipe or network disk that is written to: the exit does not wait for it.
        end = threading.Timer(_WRITING, os._exit, (EXIT_HANG,))
        end.daemon = True
        end.start()
        try:
            cause = f"no progress for {self._timeout:g} seconds ({self._where()})"
            text = f"drivetrain: {cause}; stacks of all threads follow, then exit {EXIT_HANG}\n"
            sys.stderr.write(text)
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            if self._directory is not None:
                with contextlib.suppress(OSError):  # the cause is the last line all the same
                    write_stacks(self._directory / "hang-stacks.txt", text)
            write_now(f"drivetrain: {cause}; exit code {EXIT_HANG}\n")
            record(RankFailure(cause))
        finally:
            end_workers()
            os._exit(EXIT_HANG)

    def _where(self) -> str:
        try:
            return self._describe()
        except Exception as error:  # the process must exit all the same
            return f"at an unknown location: {type(error).__name__}: {error}"
