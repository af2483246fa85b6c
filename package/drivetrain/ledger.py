"""What a run's time goes to, written down as it passes: the file `ledger.jsonl` of the run directory.

`drivetrain.runs` reads it, over all the attempts that a run takes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drivetrain.distributed.process_start import process_age
from drivetrain.runs import NAME, VERSION

if TYPE_CHECKING:
    from drivetrain.run import Run

SPENT = ("set-up", "data", "compute", "evaluation", "save", "restore")
"""What the time of an attempt goes to; what is lost, and waiting, only later attempts can tell."""

_LEAST, _MOST, _SHARE = 1.0, 60.0, 0.002
"""Seconds between two lines that nothing else gives cause to: a share of the attempt's age. A process that
is killed leaves no last word, so that this is what of its time is not known."""

_PATIENCE = 10.0
"""Seconds that the end of a run waits for a line that is being written."""

_GOES_ON = "on_save_error='warn' goes on without it"

_began_with_process: int | None = None
"""The process, by its id, whose first fit has begun; a copy of it is another."""


def fit_began() -> float:
    """When a fit that is called now began, on `perf_counter`'s clock.

    The first of a program began with the process; not so where somebody types, who may have done other things
    before. Every other begins with its call.
    """
    global _began_with_process
    now, pid = perf_counter(), os.getpid()
    if _began_with_process == pid or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    _began_with_process = pid
    return now - process_age()


class Ledger:
    """Writes what the time of one attempt goes to; nothing, until it is told where.

    A line is written when something changes for whoever resumes: at the start, when training begins, after
    each save, when the run is taken back, at the end; and by a thread now and then. So a step pays nothing.
    Each line has the whole account of the attempt, so that one that could not be written is not missed.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file: Path | None = None
        self._attempt = ""
        self._since = perf_counter()
        self._doing: tuple[str, float] | None = None
        self._restored = 0.0
        self._loop: _Loop | None = None
        self._over: float | None = None
        self._written = self._since
        self._trouble: OSError | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, directory: Path, since: float) -> None:
        """Write it, from when the run's boundary is entered on.

        Args:
            directory: The run directory.
            since: When the attempt began, on `perf_counter`'s clock.
        """
        self._file = directory / NAME
        self._since = since

    def __enter__(self) -> Ledger:
        if self._file is not None:
            self._attempt = os.urandom(6).hex()
            self.note("start", raises=False)  # the other ranks would not hear of it yet
            self._thread = threading.Thread(target=self._beat, name="drivetrain-ledger", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._done.set()
        self._thread.join(_PATIENCE)
        is_stuck, self._thread = self._thread.is_alive(), None
        if is_stuck:  # in a disk that does not answer; whatever else is saved there has told of it
            return
        in_order = error is None or isinstance(error, GeneratorExit)
        self.note("end", raises=in_order, ended="finished" if in_order else type(error).__name__)
        if self._trouble is None:
            return
        run, lost = self._run, f"the end of {NAME}"
        if in_order:
            then = "The run has ended well, and what this attempt's last seconds went to stays unknown"
            run.save_errors.tell("ledger", lost, self._trouble, run.last_checkpoint, then)
        elif error is not None:
            error.add_note(f"drivetrain: {lost} was not saved: {self._trouble}")

    def train(self) -> None:
        """Training begins: what came before was set-up."""
        run = self._run
        with self._lock:
            self._loop = _Loop(
                perf_counter(),
                self._restored,
                dict(run.timing),
                run.progress.updates,
                run.last_checkpoint is None,
            )
        self.note("train")

    def end_training(self) -> None:
        """Training is over, in order or not."""
        if self._over is None:
            self._over = perf_counter()

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the time spent inside to the run's `timing`; that of "restore" here alone, as what is restored
        has a `timing` of its own.
        """
        outer, start, is_done = self._doing, perf_counter(), False
        self._doing = kind, start
        try:
            yield
            is_done = True
        finally:
            # In this order: who reads both, in the thread, counts nothing twice.
            self._doing = outer
            seconds = perf_counter() - start
            if kind == "restore":
                self._restored += seconds
                if outer is not None:  # which adds all of its own time later
                    self._run.timing[outer[0]] -= seconds
            else:
                self._run.timing[kind] += seconds
            if kind == "save":
                self.note("save", raises=is_done)

    def note(self, event: str, *, raises: bool = True, **more: Any) -> None:
        """Write a line, if there is a file.

        Args:
            event: What has happened.
            raises: Whether it is an error if that cannot be written, unless `Trainer(on_save_error="warn")`
                goes on without it: a later line makes up for it.
            **more: What else the line has.

        Raises:
            OSError: It cannot.
        """
        if self._file is None or not self._attempt:
            return
        with self._lock:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._write(event, more)
            except OSError as error:
                self._trouble = error
                if raises and not self._run.save_errors.tolerates:
                    error.add_note(f"drivetrain: what {NAME} tells of the time was not saved; {_GOES_ON}")
                    raise
            else:
                self._trouble = None

    def _beat(self) -> None:
        assert self._file is not None
        while not self._done.wait(max(0.0, self._due() - perf_counter())):
            with self._lock:
                if perf_counter() < self._due():  # something else was written meanwhile
                    continue
                self._written = perf_counter()
                try:
                    if self._file.exists():  # what was removed is made again when there is something to save
                        self._write("beat", {})
                except OSError as error:
                    self._trouble = error

    def _due(self) -> float:
        """When the thread writes, unless something else is written before."""
        age = self._written - self._since
        return self._written + min(max(_LEAST, _SHARE * age), _MOST)

    def _write(self, event: str, more: dict[str, Any]) -> None:
        assert self._file is not None
        run, loop, now = self._run, self._loop, perf_counter()
        spent, between = self._account(now)
        line = {
            "v": VERSION,
            "event": event,
            "attempt": self._attempt,
            "time": round(time.time(), 3),
            "updates": run.progress.updates,
            "from": None if loop is None else loop.updates,
            "fresh": None if loop is None else loop.is_fresh,
            "spent": {kind: round(seconds, 4) for kind, seconds in spent.items()},
            "between": round(between, 4),
            **more,
        }
        data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
        with self._file.open("a+b") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a process was killed, or a disk was full, in the middle of a line
                    data = b"\n" + data
            file.write(data)
        self._written = now

    def _account(self, now: float) -> tuple[dict[str, float], float]:
        """The seconds of the attempt by kind, which add up to its age; and those of "compute" between two
        updates: in callbacks, at log points, in the body of a loop.
        """
        spent = dict.fromkeys(SPENT, 0.0)
        timing, loop = dict(self._run.timing), self._loop
        doing = self._doing
        spent["restore"] = self._restored
        if doing is not None and doing[0] in spent:
            spent[doing[0]] += now - doing[1]
        if loop is None:
            spent["set-up"] = max(0.0, now - self._since - spent["restore"])
            return spent, 0.0
        for kind in ("data", "evaluation", "save"):
            spent[kind] += max(0.0, timing[kind] - loop.timing[kind])
        until = now if self._over is None else self._over
        compiled = timing.get("compile", 0.0) - loop.timing.get("compile", 0.0)
        other = spent["data"] + spent["evaluation"] + spent["save"] + spent["restore"] - loop.restored
        spent["compute"] = max(0.0, until - loop.began - compiled - other)
        spent["set-up"] = loop.began - self._since - loop.restored + compiled + now - until
        return spent, max(0.0, spent["compute"] - (timing["compute"] - loop.timing["compute"]))


class _Loop:
    """Where training began: when, what was restored and timed until then, after which update, and whether it
    goes on from no checkpoint.
    """

    def __init__(
        self, began: float, restored: float, timing: dict[str, float], updates: int, is_fresh: bool
    ) -> None:
        self.began = began
        self.restored = restored
        self.timing = timing
        self.updates = updates
        self.is_fresh = is_fresh
