"""The limit of time without progress, and a watchdog that ends a run of one process after it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from types import TracebackType

from drivetrain.distributed import failure_wire
from drivetrain.distributed.doing import Phase
from drivetrain.distributed.last_words import end_workers, record
from drivetrain.errors import RankFailure

EXIT_HANG = 75
"""The exit code of a process that was ended because it hung; `EX_TEMPFAIL` of sysexits.h: try again."""

_WRITING = 10.0
"""Seconds that writing the stacks may take."""


class Stillness:
    """The time without any progress, as the caller counts it, and whether that is too long.

    Args:
        limit: Seconds that count as a hang.
        unseen: Seconds more for what shows no progress until it is done: see `Phase`.
    """

    def __init__(self, limit: float, unseen: float) -> None:
        self._limit = limit
        self._unseen = unseen
        self.end()

    def end(self) -> None:
        """There was progress."""
        self._seconds = self._seconds_unseen = 0.0

    @property
    def is_suspicious(self) -> bool:
        """Whether half of the limit has passed without progress."""
        return self._seconds + self._seconds_unseen >= self._limit / 2

    def add(self, seconds: float, phases: Iterable[Phase]) -> bool:
        """Add time without progress; returns whether it is too long.

        While a rank compiles, saves or loads, its own limit counts; while all ranks are in the body of the
        program's own loop, none does.

        Args:
            seconds: The time since the last call.
            phases: Where all ranks are.
        """
        phases = set(phases)
        if Phase.UNSEEN in phases:
            self._seconds_unseen += seconds
        elif phases != {Phase.OUTSIDE}:
            self._seconds += seconds
        # Ten times a tenth of a second is a little less than a second.
        slack = 1e-6 * self._limit
        total = self._seconds + self._seconds_unseen
        return self._seconds >= self._limit - slack or total >= self._limit + self._unseen - slack


class Watchdog:
    """Ends the process when `heartbeat` gives the same value for longer than `timeout`.

    A thread asks a few times per timeout, so that the step itself pays nothing. On expiry the stacks of all
    threads go to standard error and to `hang-stacks.txt` in `directory`, and the process exits with
    `EXIT_HANG` without unwinding: a main thread that is stuck in a system call or a kernel cannot be
    interrupted. A process that is itself suspended, as by a laptop's lid, does not count as hung.

    Args:
        timeout: Seconds without progress that count as a hang.
        heartbeat: Changes whenever progress is made.
        describe: Says where the run is.
        directory: Where the stacks are written too; None for standard error only.
        phase: Says how the time counts.
    """

    def __init__(
        self,
        timeout: float,
        heartbeat: Callable[[], Hashable],
        describe: Callable[[], str],
        directory: Path | None = None,
        phase: Callable[[], Phase] = lambda: Phase.WORKS,
    ) -> None:
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._describe = describe
        self._directory = directory
        self._phase = phase
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drivetrain-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        tick = self._timeout / 10
        still = Stillness(self._timeout, failure_wire.TIMING.unseen)
        last = self._heartbeat()
        while not self._done.wait(tick):
            now = self._heartbeat()
            if now != last:
                still.end()
            elif still.add(tick, [self._phase() if still.is_suspicious else Phase.WORKS]):
                self._expire()
            last = now

    def _expire(self) -> None:
        # What hangs may be what is written to, a pipe or a network's disk: the end does not wait for it.
        end = threading.Timer(_WRITING, os._exit, (EXIT_HANG,))
        end.daemon = True
        end.start()
        try:
            text = (
                f"drivetrain: no progress for {self._timeout:g} seconds ({self._where()}); stacks of all"
                f" threads follow, then exit {EXIT_HANG}\n"
            )
            sys.stderr.write(text)
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
                with open(self._directory / "hang-stacks.txt", "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    faulthandler.dump_traceback(file=file, all_threads=True)
            record(RankFailure(f"no progress for {self._timeout:g} s ({self._where()})"))
        finally:
            end_workers()
            os._exit(EXIT_HANG)

    def _where(self) -> str:
        try:
            return self._describe()
        except Exception as error:  # the process has to end all the same
            return f"where, cannot be told: {type(error).__name__}: {error}"
