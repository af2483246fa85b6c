"""What was written down of a run, read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.testing.resume.recording import TIMED


class Recorded:
    """What one rank wrote down of one run.

    Args:
        file: The file.

    Attributes:
        start: The first row, from before any update; None where there is none.
        next: What was held as the first update after the save began; None where that is not recorded.
        updates: Those of the updates.
        end: The last one, of a fit that has ended in order.
        killed: Whether it was killed where it was to be.
        failed: After which update an exception has ended it, and which one; None if none has.
        timed: Patterns of names that were logged and are measurements of time.
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
            if not line.endswith("}"):  # of a rank that was killed while it wrote
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
        """What was computed in an update, by name."""
        row = self.end if after_end else self.updates[update]
        items = (row or {"items": ()})["items"]
        return {f"{part} {name}": text for part, name, text in items if part != TIMED}

    def held(self, update: int) -> dict[str, str]:
        """What the program's objects held after an update, by place."""
        return dict(self.updates[update]["held"])


def read(directory: Path, kind: str) -> list[Recorded]:
    """All ranks' files of a run."""
    found = sorted((directory / kind).glob("rank-*.jsonl"), key=lambda each: int(each.stem.split("-")[-1]))
    return [Recorded(each) for each in found]
