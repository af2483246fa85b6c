"""What runs have spent their time on, over all their restarts: reads what `drivetrain.ledger` has written.

Imports no torch, so that a command line need not wait for it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from drivetrain.errors import DataError

KINDS = ("compute", "data", "evaluation", "save", "restore", "set-up", "lost work", "waiting")
"""What every second of a run is assigned to."""

NAME = "ledger.jsonl"
"""The file's name, in the run directory."""

VERSION = 1
"""Of what stands in a line."""

_REDONE = ("compute", "data", "evaluation", "save")
"""What is lost of an attempt after the checkpoint that a later one went on from."""

_IN_ORDER = ("finished", "Preempted", "KeyboardInterrupt")
"""Ends between two updates."""

_LONGEST = 1 << 16
"""Bytes of a line; ours have some hundred."""

_AHEAD = 86_400.0
"""Seconds that the clock of the machine that wrote a line may be ahead of the reader's."""

_DEEPEST = 4
"""Directories below the one that is searched."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: a process's fit.

    Attributes:
        began: When, in seconds since 1970.
        heard: When it was last heard of.
        waited: Seconds between the attempt before and this one.
        seconds: Seconds by `KINDS`, without "waiting"; "lost work" is what later attempts have made again.
        between: Seconds of "compute" between two updates.
        resumed: The update it went on from; 0 for a start, None if it did not come to train.
        updates: The last update that it is known to have made.
        ended: "finished", the name of the error that ended it, or None without a last word: it was killed, or
            is running.
    """

    began: float
    heard: float
    waited: float
    seconds: Mapping[str, float]
    between: float
    resumed: int | None
    updates: int
    ended: str | None

    @property
    def wall(self) -> float:
        """Seconds of it, without those before it."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "began": self.began,
            "heard": self.heard,
            "waited": self.waited,
            "wall": self.wall,
            "seconds": dict(self.seconds),
            "between": self.between,
            "resumed": self.resumed,
            "updates": self.updates,
            "ended": self.ended,
        }


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
    def between(self) -> float:
        """Seconds of "compute" between two updates: callbacks, log points, the body of a loop; on a GPU also
        waiting for it there.
        """
        return min(sum(each.between for each in self.attempts), self.seconds["compute"])

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
            "between": self.between,
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
        for line in _lines(file):
            row = _parsed(line)
            if row is None or not _is_possible(row, rows.get(row.attempt, ())):
                unreadable += 1
            else:
                rows.setdefault(row.attempt, []).append(row)
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"nothing in {str(file)!r} can be read as the ledger of a run, version {VERSION}")
    return RunLedger(path, _attempts(list(rows.values())), unreadable)


def find_runs(directory: str | os.PathLike[str]) -> list[Path]:
    """The directories with a ledger: this one, and those below it, sorted."""
    found: list[Path] = []
    top = _directory(directory)
    for each, below, files in os.walk(top):
        depth = len(Path(each).relative_to(top).parts)
        below[:] = sorted(name for name in below if name != "checkpoints") if depth < _DEEPEST else []
        if NAME in files:
            found.append(Path(each))
    return sorted(found)


def _directory(given: str | os.PathLike[str]) -> Path:
    """The directory that is meant, also by the path of the ledger in it."""
    path = Path(given)
    return path.parent if path.name == NAME and path.is_file() else path


# The lines.


@dataclass(frozen=True)
class _Row:
    """A line: the account of an attempt at a moment."""

    attempt: str
    event: str
    time: float
    updates: int
    resumed: int | None
    is_fresh: bool
    spent: Mapping[str, float]
    between: float
    ended: str | None


def _lines(file: Path) -> Iterator[bytes]:
    """The lines, of which one that is too long comes in parts, as lines that cannot be read."""
    with file.open("rb") as stream:
        while line := stream.readline(_LONGEST):
            if line.strip():
                yield line


def _parsed(line: bytes) -> _Row | None:
    """A line that is whole; None for any other."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or given.get("v") != VERSION:
        return None
    spent, resumed, ended = given.get("spent"), given.get("from"), given.get("ended")
    texts = given.get("attempt"), given.get("event")
    numbers = [
        given.get("time"),
        given.get("between"),
        given.get("updates"),
        0 if resumed is None else resumed,
    ]
    if not isinstance(spent, dict) or not all(isinstance(each, str) for each in texts):
        return None
    if not all(_is_amount(each) for each in (*numbers, *spent.values())) or set(spent) - set(KINDS):
        return None
    return _Row(
        attempt=given["attempt"],
        event=given["event"],
        time=float(given["time"]),
        updates=int(given["updates"]),
        resumed=None if resumed is None else int(resumed),
        is_fresh=given.get("fresh") is True,
        spent={kind: float(seconds) for kind, seconds in spent.items()},
        between=float(given["between"]),
        ended=ended if isinstance(ended, str) else None,
    )


def _is_possible(row: _Row, before: Sequence[_Row]) -> bool:
    """Whether a line can be true: not of tomorrow, nor of fewer updates than its attempt began with, unless
    that was taken back, as a line before says.
    """
    if row.time > time.time() + _AHEAD:
        return False
    if row.resumed is None or row.resumed <= row.updates or row.event == "back":
        return True
    return any(each.event == "back" for each in before)


def _is_amount(value: Any) -> bool:
    """Whether it is a number that seconds, or a count, can be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15


# What is lost.


@dataclass
class _Part:
    """A stretch of an attempt without a way back in it: the whole, or up to where the run was taken back.

    Attributes:
        attempt: Its number.
        resumed: The update it began after; None if nothing was trained.
        rows: Its lines; the first is where it begins.
        limit: The update up to which its work counts.
    """

    attempt: int
    resumed: int | None
    rows: list[_Row]
    limit: float = math.inf

    def lost(self) -> tuple[dict[str, float], float]:
        """What was spent on updates that do not count, by kind; and what of it between updates."""
        if self.resumed is None or self.limit == math.inf:
            return {}, 0.0
        last = self.rows[-1]
        if last.ended in _IN_ORDER and last.updates <= self.limit:
            return {}, 0.0
        kept, between = self._kept()
        lost = {kind: max(0.0, last.spent.get(kind, 0.0) - kept.get(kind, 0.0)) for kind in _REDONE}
        return lost, max(0.0, last.between - between)

    def _kept(self) -> tuple[Mapping[str, float], float]:
        """The account when the last update that counts was made, and saved if it was."""
        first, limit = self.rows[0], self.limit
        if self.resumed is None or limit <= self.resumed:
            return first.spent, first.between
        saved = [each for each in self.rows if each.event == "save" and each.updates == limit]
        if saved:
            return saved[-1].spent, saved[-1].between
        for before, after in pairwise(self.rows):
            if before.updates <= limit < after.updates:
                share = (limit - before.updates) / (after.updates - before.updates)
                spent = {
                    kind: seconds + share * (after.spent.get(kind, 0.0) - seconds)
                    for kind, seconds in before.spent.items()
                }
                return spent, before.between + share * (after.between - before.between)
        return self.rows[-1].spent, self.rows[-1].between


def _parts(number: int, rows: Sequence[_Row]) -> list[_Part]:
    """An attempt, parted where it was taken back."""
    trained = [each for each in rows if each.resumed is not None]
    if not trained:
        return [_Part(number, None, list(rows))]
    parts = [_Part(number, trained[0].resumed, [trained[0]])]
    for row in trained[1:]:
        parts[-1].rows.append(row)
        if row.event == "back":
            parts.append(_Part(number, row.updates, [row]))
    return parts


def _attempts(found: Sequence[Sequence[_Row]]) -> list[Attempt]:
    parts = [_parts(number, rows) for number, rows in enumerate(found)]
    limit = math.inf
    for part in (each for of_one in reversed(parts) for each in reversed(of_one)):
        part.limit = limit
        if part.resumed is not None:
            is_new = part.rows[0].event != "back" and part.rows[0].is_fresh
            before = found[part.attempt - 1] if part.attempt else ()
            # A run that has finished, and another in its directory that does not go on from it.
            is_another = is_new and bool(before) and before[-1].ended == "finished"
            limit = math.inf if is_another else min(limit, part.resumed)
    return [
        _attempt(rows, parts[number], found[number - 1] if number else ())
        for number, rows in enumerate(found)
    ]


def _attempt(rows: Sequence[_Row], parts: Sequence[_Part], before: Sequence[_Row]) -> Attempt:
    first, last = rows[0], rows[-1]
    seconds = {kind: last.spent.get(kind, 0.0) for kind in KINDS if kind != "waiting"}
    between = last.between
    for part in parts:
        lost, lost_between = part.lost()
        for kind, amount in lost.items():
            seconds[kind] -= amount
            seconds["lost work"] += amount
        between -= lost_between
    began = first.time - sum(first.spent.values())
    return Attempt(
        began=began,
        heard=last.time,
        waited=max(0.0, began - before[-1].time) if before else 0.0,
        seconds={kind: max(0.0, amount) for kind, amount in seconds.items()},
        between=max(0.0, between),
        resumed=last.resumed,
        updates=last.updates,
        ended=last.ended,
    )
