"""The time of runs over all their restarts, read from the files that `drivetrain.run.ledger` writes.

Imports no torch, so that the command line starts fast.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from drivetrain.core.errors import DataError
from drivetrain.core.files import check_path, lines_of

KINDS = ("compute", "data", "evaluation", "save", "restore", "set-up", "lost work", "waiting")
"""The kinds of time; every second of a run belongs to one."""

NAME = "ledger.jsonl"
"""The file's name, in the run directory."""

VERSION = 1
"""The version of a line's format."""

_Row: TypeAlias = dict[str, Any]
"""A line of the file, which `drivetrain.run.ledger` writes: the totals of an attempt at one time."""

_REDONE = ("compute", "data", "evaluation", "save")
"""The kinds of time that are lost if they come after the checkpoint that a later attempt resumes."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: a process's fit.

    Attributes:
        began: The start, in seconds since 1970.
        heard: The time of its last line.
        waited: Seconds between the attempt before and this one.
        seconds: Seconds by `KINDS`, without "waiting"; "lost work" was repeated by later attempts.
        resumed: The step it resumed from; 0 for a fresh start, None if it never trained.
        steps: The last step that it recorded.
        ended: "finished", or the name of the error that ended it. None if it has no last line: it was killed,
            or is running.
        error: The error's text; None without an error.
        warnings: The messages of the package's warnings, each once.
    """

    began: float
    heard: float
    waited: float
    seconds: Mapping[str, float]
    resumed: int | None
    steps: int
    ended: str | None
    error: str | None = None
    warnings: Sequence[str] = ()

    @property
    def wall(self) -> float:
        """The attempt's seconds, without the waiting before it."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "wall": self.wall}


@dataclass(frozen=True)
class RunLedger:
    """The time that a run has spent, by kind.

    Attributes:
        directory: The run directory.
        attempts: All attempts, in order.
        unreadable: The number of lines that could not be read, for example torn by a kill.
    """

    directory: Path
    attempts: Sequence[Attempt]
    unreadable: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by `KINDS`; they add up to `wall`."""
        found = {kind: sum(each.seconds.get(kind, 0.0) for each in self.attempts) for kind in KINDS}
        found["waiting"] = sum(each.waited for each in self.attempts)
        return found

    @property
    def wall(self) -> float:
        """Seconds from the start of the first attempt's process to the run's last line.

        Within an attempt a monotonic clock counts. Between two attempts the system's clock counts; nothing is
        counted if it was set back.
        """
        return sum(each.waited + each.wall for each in self.attempts)

    @property
    def goodput(self) -> float:
        """The share of the time spent on steps that count: "compute" over `wall`."""
        return self.seconds["compute"] / self.wall if self.wall > 0 else 0.0

    @property
    def steps(self) -> int:
        """The last recorded step of the newest attempt that trained."""
        return next((each.steps for each in reversed(self.attempts) if each.resumed is not None), 0)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {
            "directory": str(self.directory),
            "steps": self.steps,
            "wall": self.wall,
            "goodput": self.goodput,
            "seconds": self.seconds,
            "attempts": [each.to_json() for each in self.attempts],
            "unreadable": self.unreadable,
        }


def read_ledger(directory: str | os.PathLike[str]) -> RunLedger:
    """Return the time that a run has spent so far; it may be running.

    Args:
        directory: The run directory, or its ledger.

    Raises:
        DataError: There is no ledger in it, or nothing in it can be read.
    """
    path = _directory(directory)
    file = path / NAME
    if not file.is_file():
        raise DataError(
            f"there is no {NAME} in {str(path)!r}: give the run directory of a fit that writes checkpoints"
            " or logs, such as runs/Digits-20250131-120000"
        )
    rows: dict[str, list[_Row]] = {}
    unreadable = 0
    try:
        for line in filter(bytes.strip, lines_of(file)):
            row = _parsed(line)
            if row is None:
                unreadable += 1
            else:
                rows.setdefault(str(row["attempt"]), []).append(row)
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"nothing in {str(file)!r} can be read as the ledger of a run, version {VERSION}")
    return RunLedger(path, _attempts(list(rows.values())), unreadable)


def find_runs(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the directories with a ledger: this one and those below it, sorted."""
    return sorted(file.parent for file in _directory(directory).rglob(NAME))


def _directory(given: str | os.PathLike[str]) -> Path:
    """Return the run directory, given itself or the path of its ledger."""
    check_path(given)
    path = Path(given)
    return path.parent if path.name == NAME and path.is_file() else path


def _parsed(line: bytes) -> _Row | None:
    """Return a complete line; None for any other."""
    try:
        row: _Row = json.loads(line)
        amounts = (row["time"], row["steps"], row["from"] or 0, *row["spent"].values())
        is_ours = (
            row["v"] == VERSION
            and {"attempt", "event", "fresh"} <= row.keys()
            and row["spent"].keys() <= set(KINDS)
        )
        return row if is_ours and all(0 <= each < 1e11 for each in amounts) else None
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


def _attempts(found: Sequence[Sequence[_Row]]) -> list[Attempt]:
    """Return the attempts of a run, from the lines of each."""
    made: list[Attempt] = []
    limit = math.inf  # work counts up to this step: later attempts repeated the rest
    for number in reversed(range(len(found))):
        before = found[number - 1] if number else ()
        attempt, limit = _attempt(found[number], before, limit)
        made.append(attempt)
    return made[::-1]


def _attempt(rows: Sequence[_Row], before: Sequence[_Row], limit: float) -> tuple[Attempt, float]:
    """Return an attempt, and the last step of earlier attempts that it did not repeat."""
    first, last = rows[0], rows[-1]
    seconds = {kind: last["spent"].get(kind, 0.0) for kind in KINDS if kind != "waiting"}
    if trained := [each for each in rows if each["from"] is not None]:
        kept = next((each for each in reversed(trained) if each["steps"] <= limit), trained[0])
        for kind in _REDONE:
            lost = max(0.0, last["spent"].get(kind, 0.0) - kept["spent"].get(kind, 0.0))
            seconds[kind] -= lost
            seconds["lost work"] += lost
        limit = min(limit, trained[0]["steps"])
    if last["fresh"] is True and before and before[-1].get("ended") == "finished":
        limit = math.inf  # another run in the directory of one that has finished
    began = first["time"] - sum(first["spent"].values())
    attempt = Attempt(
        began=began,
        heard=last["time"],
        waited=max(0.0, began - before[-1]["time"]) if before else 0.0,
        seconds={kind: max(0.0, amount) for kind, amount in seconds.items()},
        resumed=last["from"],
        steps=last["steps"],
        ended=last.get("ended"),
        error=last.get("error"),
        warnings=[str(each.get("message")) for each in rows if each["event"] == "warning"],
    )
    return attempt, limit
