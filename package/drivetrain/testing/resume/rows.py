"""Read the records of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.testing.resume.recording import TIMED


class Recorded:
    """The record of one run on one rank.

    Args:
        file: The file to read.

    Attributes:
        start: The row written before the first update, or None.
        next: The row written at the start of the first update after the save, or None.
        updates: The row of each update.
        end: The last row of a fit that ended without an exception, or None.
        killed: Whether the run was killed at the chosen update.
        failed: The exception that ended the run, and the update before it, or None.
        timed: Name patterns of logged values that measure time.
    """

    def __init__(self, file: Path) -> None:
        self.start: Mapping[str, Any] | None = None
        self.next: Mapping[str, Any] | None = None
        self.updates: dict[int, Mapping[str, Any]] = {}
        self.end: Mapping[str, Any] | None = None
        self.killed = False
        self.failed: str | None = None
        self.timed: set[str] = set()
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.endswith("}"):  # the rank was killed while it wrote this line
                continue
            row = json.loads(line)
            if row["kind"] == "start":
                self.start = row
            elif row["kind"] == "next":
                self.next = row
            elif row["kind"] == "update":
                self.updates[row["update"]] = row
            elif row["kind"] == "end":
                self.end = row
            elif row["kind"] == "failed":
                self.failed = f"after update {row['update']}: {row['error']}"
            else:
                self.killed = True
            self.timed.update(name for part, name, _ in row.get("items", ()) if part == TIMED)

    def items(self, update: int, after_end: bool = False) -> dict[str, str]:
        """Return the values computed in an update, by name."""
        row = self.end if after_end else self.updates[update]
        items = (row or {"items": ()})["items"]
        return {f"{part} {name}": text for part, name, text in items if part != TIMED}

    def program_state(self, update: int) -> dict[str, str]:
        """Return the state of the program's objects after an update, by place."""
        return dict(self.updates[update]["program state"])


def read(directory: Path, kind: str) -> list[Recorded]:
    """Read the records of all ranks of a run."""
    found = sorted((directory / kind).glob("rank-*.jsonl"), key=lambda each: int(each.stem.split("-")[-1]))
    return [Recorded(each) for each in found]
