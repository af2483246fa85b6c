"""The ledger of a run's time: the totals by kind of each attempt, in `ledger.jsonl` of the run directory.

`drivetrain.run.ledger_report` reads it, over all the attempts of a run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from drivetrain.core.files import open_file
from drivetrain.core.messages import Listener, handled_by
from drivetrain.distributed.launch.process_start import process_age
from drivetrain.loggers.files import to_json
from drivetrain.run.ledger_report import NAME, VERSION
from drivetrain.run.state import RunState

SPENT = ("set-up", "data", "compute", "evaluation", "save", "restore")
"""The kinds of time that an attempt can measure; lost work and waiting are computed from later attempts."""

_SPANS = {"evaluation": "validation", "save": "saving", "restore": "restoring"}
"""The names of the spans, on the run's clock, of the kinds that `Ledger.timed` takes."""

_BETWEEN = 1.0
"""Seconds between two lines that only show that the attempt is alive."""

_MESSAGES, _LONGEST = 100, 2000
"""The most warnings of an attempt that are kept, and the most characters of each."""

_began_with_process: int | None = None
"""The id of the process whose first fit has begun; a forked copy has another."""


def fit_began() -> float:
    """Return the start time of a fit that is called now, on `perf_counter`'s clock.

    The first fit of a program starts with the process. In an interactive session, and for every further fit,
    the start time is now.
    """
    global _began_with_process
    now, pid = perf_counter(), os.getpid()
    if _began_with_process == pid or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    _began_with_process = pid
    return now - process_age()


class Ledger:
    """Writes the time of one attempt by kind, once `keep` has given it a directory.

    It writes a line at the start, when training begins, after each save, with each
    warning of the package, at log points a second apart, and at the end. So a step costs nothing. Each line
    has the totals of the attempt, so that the next line replaces one that could not be written.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._file: Path | None = None
        self._attempt = ""
        self._since = perf_counter()
        self._restored = 0.0
        self._loop: _Loop | None = None
        self._over: float | None = None
        self._written = self._since
        self._trouble: OSError | None = None
        self._heard: set[str] = set()
        self._listening = ExitStack()

    def keep(self, directory: Path, since: float) -> None:
        """Start writing into a directory.

        Args:
            since: The start of the attempt, on `perf_counter`'s clock.
        """
        self._file = directory / NAME
        self._since = since

    def __enter__(self) -> Ledger:
        if self._file is not None:
            self._attempt = os.urandom(6).hex()
            self.note("start")
            self._listening.enter_context(handled_by(Listener(logging.WARNING, self._hear)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self._listening.close()
        in_order = error is None or isinstance(error, GeneratorExit)
        if in_order:
            self.note("end", ended="finished")
        else:
            self.note("end", ended=type(error).__name__, error=str(error)[:_LONGEST])
        if self._trouble is None:
            return
        run, lost = self._run, f"the end of {NAME}"
        if in_order:
            then = "The run has ended well; only the use of this attempt's last seconds stays unknown"
            run.save_errors.report(lost, self._trouble, run.last_checkpoint, then)
        elif error is not None:
            error.add_note(f"drivetrain: {lost} was not saved: {self._trouble}")

    def train(self) -> None:
        """Mark the beginning of training: the time before was set-up."""
        run = self._run
        self._loop = _Loop(
            perf_counter(), self._restored, dict(run.timing), run.progress.steps, run.last_checkpoint is None
        )
        self.note("train")

    def end_training(self) -> None:
        """Mark the end of training, in order or not: the time after counts as set-up."""
        if self._over is None:
            self._over = perf_counter()

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Run the block and add its time to the run's `timing`.

        The time of "restore" is stored here only, because the restored state has a `timing` of its own.
        """
        clock = self._run.clock
        clock.begin(_SPANS[kind])
        try:
            yield
        finally:
            seconds = clock.end()
            if kind == "restore":
                self._restored += seconds
            else:
                self._run.timing[kind] += seconds
            if kind == "save":
                self.note("save")

    def _hear(self, message: str) -> None:
        message = message[:_LONGEST]
        if message not in self._heard and len(self._heard) < _MESSAGES:
            self._heard.add(message)
            self.note("warning", message=message)

    def note_alive(self) -> None:
        """Write a line if the last one is more than a second old."""
        if self._file is not None and perf_counter() - self._written > _BETWEEN:
            self.note("log")

    def note(self, event: str, **more: Any) -> None:
        """Write a line, if there is a file. No error ends the run: the next line replaces a missing one."""
        if self._file is None or not self._attempt:
            return
        run, loop, now = self._run, self._loop, perf_counter()
        line = {
            "v": VERSION,
            "event": event,
            "attempt": self._attempt,
            "time": round(time.time(), 3),
            "steps": run.progress.steps,
            "from": None if loop is None else loop.steps,
            "fresh": None if loop is None else loop.is_fresh,
            "spent": {kind: round(seconds, 4) for kind, seconds in self._account(now).items()},
            **more,
        }
        data = json.dumps(to_json(line), separators=(",", ":")).encode("ascii") + b"\n"
        self._trouble = None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open_file(self._file, "a+b") as file:
                if file.seek(0, os.SEEK_END) > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a killed process or a full disk has left an incomplete line
                        data = b"\n" + data
                file.write(data)
            self._written = now
        except OSError as error:
            self._trouble = error

    def _account(self, now: float) -> dict[str, float]:
        """Return the seconds of the attempt by kind, which add up to its age."""
        spent = dict.fromkeys(SPENT, 0.0)
        timing, loop = self._run.timing, self._loop
        spent["restore"] = self._restored
        if loop is None:
            spent["set-up"] = max(0.0, now - self._since - spent["restore"])
            return spent
        for kind in ("data", "evaluation", "save"):
            spent[kind] = max(0.0, timing[kind] - loop.timing[kind])
        until = now if self._over is None else self._over
        compiled = timing.get("compile", 0.0) - loop.timing.get("compile", 0.0)
        other = spent["data"] + spent["evaluation"] + spent["save"] + spent["restore"] - loop.restored
        spent["compute"] = max(0.0, until - loop.began - compiled - other)
        spent["set-up"] = loop.began - self._since - loop.restored + compiled + now - until
        return spent


class _Loop(NamedTuple):
    """The beginning of training.

    Attributes:
        began: When, on `perf_counter`'s clock.
        restored: Seconds of restoring before.
        timing: The run's `timing` before.
        steps: The step after which it goes on.
        is_fresh: Whether it goes on from no checkpoint.
    """

    began: float
    restored: float
    timing: dict[str, float]
    steps: int
    is_fresh: bool
