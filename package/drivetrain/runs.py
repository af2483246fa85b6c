"""The time of runs over all their restarts, read from the files that `drivetrain.ledger` writes.

Imports no torch, so that a command line need not wait for it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.errors import DataError

KINDS = ("compute", "data", "evaluation", "save", "restore", "set-up", "lost work", "waiting")
"""What every second of a run is assigned to."""

NAME = "ledger.jsonl"
"""The file's name, in the run directory."""

VERSION = 1
"""Of what stands in a line."""

_REDONE = ("compute", "data", "evaluation", "save")
"""What is lost of an attempt after the checkpoint that a later one went on from."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: a process's fit.

    Attributes:
        began: When, in seconds since 1970.
        heard: When it was last heard of.
        waited: Seconds between the attempt before and this one.
        seconds: Seconds by `KINDS`, without "waiting"; "lost work" is what later attempts have made again.
        resumed: The update it went on from; 0 for a start, None if it did not come to train.
        updates: The last update that it is known to have made.
        ended: "finished", the name of the error that ended it, or None without a last word: it was killed, or
            is running.
    """

    began: float
    heard: float
    waited: float
    seconds: Mapping[str, float]
    resumed: int | None
    updates: int
    ended: str | None

    @property
    def wall(self) -> float:
        """Seconds of it, without those before it."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "wall": self.wall}


@dataclass(frozen=True)
class RunLedger:
    """What a run has spent its time on.

    Attributes:
        directory: The run directory.
        attempts: All attempts, in their order.
        unreadable: Lines of the file that could not be read: torn by a kill, or by something else.
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
        """Seconds from the first attempt's process until the run was last heard of.

        Within an attempt they are those of a clock that nobody sets. Between two the system's clock counts;
        where it was set back, nothing is counted.
        """
        return sum(each.waited + each.wall for each in self.attempts)

    @property
    def goodput(self) -> float:
        """The share of the time that went into updates that count: "compute" over `wall`."""
        return self.seconds["compute"] / self.wall if self.wall > 0 else 0.0

    @property
    def updates(self) -> int:
        """The last update that the newest attempt that trained is known to have made."""
        return next((each.updates for each in reversed(self.attempts) if each.resumed is not None), 0)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "directory": str(self.directory),
            "updates": self.updates,
            "wall": self.wall,
            "goodput": self.goodput,
            "seconds": self.seconds,
            "attempts": [each.to_json() for each in self.attempts],
            "unreadable": self.unreadable,
        }


def read_ledger(directory: str | os.PathLike[str]) -> RunLedger:
    """What a run has spent its time on so far; it may be running.

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
        with file.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                row = _parsed(line)
                if row is None:
                    unreadable += 1
                else:
                    rows.setdefault(row.attempt, []).append(row)
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"nothing in {str(file)!r} can be read as the ledger of a run, version {VERSION}")
    return RunLedger(path, _attempts(list(rows.values())), unreadable)


def find_runs(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the directories with a ledger: this one, and those below it, sorted."""
    return sorted(file.parent for file in _directory(directory).rglob(NAME))


def _directory(given: str | os.PathLike[str]) -> Path:
    """The directory that is meant, also by the path of the ledger in it."""
    path = Path(given)
    return path.parent if path.name == NAME and path.is_file() else path


class _Row(NamedTuple):
    """A line: the totals of an attempt at a moment."""

    attempt: str
    event: str
    time: float
    updates: int
    resumed: int | None
    is_fresh: bool
    spent: Mapping[str, float]
    ended: str | None


def _parsed(line: bytes) -> _Row | None:
    """Return a whole line; None for any other."""
    try:
        given = json.loads(line)
        resumed = given.get("from")
        row = _Row(
            attempt=given["attempt"],
            event=given["event"],
            time=float(given["time"]),
            updates=int(given["updates"]),
            resumed=None if resumed is None else int(resumed),
            is_fresh=given.get("fresh") is True,
            spent={kind: float(seconds) for kind, seconds in given["spent"].items()},
            ended=given.get("ended"),
        )
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    amounts = (row.time, row.updates, row.resumed or 0, *row.spent.values())
    is_ours = given.get("v") == VERSION and isinstance(row.attempt, str) and row.spent.keys() <= set(KINDS)
    return row if is_ours and all(0 <= each < 1e11 for each in amounts) else None


def _attempts(found: Sequence[Sequence[_Row]]) -> list[Attempt]:
    """Return the attempts of a run, from the lines of each."""
    made: list[Attempt] = []
    limit = math.inf  # the update up to which work counts: later attempts made the rest again
    for number in reversed(range(len(found))):
        before = found[number - 1] if number else ()
        attempt, limit = _attempt(found[number], before, limit)
        made.append(attempt)
    return made[::-1]


def _attempt(rows: Sequence[_Row], before: Sequence[_Row], limit: float) -> tuple[Attempt, float]:
    """Return an attempt, and the update up to which the work of those before it counts."""
    first, last = rows[0], rows[-1]
    seconds = {kind: last.spent.get(kind, 0.0) for kind in KINDS if kind != "waiting"}
    for stretch in reversed(_stretches(rows)):
        end = stretch[-1]
        made = stretch[:-1] if end.event == "back" and len(stretch) > 1 else stretch
        kept = next((each for each in reversed(made) if each.updates <= limit), made[0])
        for kind in _REDONE:
            lost = max(0.0, end.spent.get(kind, 0.0) - kept.spent.get(kind, 0.0))
            seconds[kind] -= lost
            seconds["lost work"] += lost
        limit = min(limit, made[0].updates)
    if last.is_fresh and before and before[-1].ended == "finished":
        limit = math.inf  # another run in the directory of one that has finished
    began = first.time - sum(first.spent.values())
    attempt = Attempt(
        began=began,
        heard=last.time,
        waited=max(0.0, began - before[-1].time) if before else 0.0,
        seconds={kind: max(0.0, amount) for kind, amount in seconds.items()},
        resumed=last.resumed,
        updates=last.updates,
        ended=last.ended,
    )
    return attempt, limit


def _stretches(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Return the lines of an attempt's training, in parts; where the run was rolled back, a part ends and the
    next begins with the same line.
    """
    trained = [each for each in rows if each.resumed is not None]
    cuts = [0, *(index for index, each in enumerate(trained) if each.event == "back"), len(trained) - 1]
    return [trained[start : end + 1] for start, end in pairwise(cuts)] if trained else []
