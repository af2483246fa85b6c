"""Read the records of a run."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.testing.resume.recording import TIMED

Values = dict[tuple[str, str], str]
"""The recorded values as texts, by kind and name."""


class Recorded:
    """The record of one run on one rank.

    Attributes:
        base: The step before the first, or None if the fit did not begin.
        begin: The state before the first step.
        steps: The values of each step, and the state after it.
        logged: The values logged at each step.
        is_whole: Whether the fit ended without an exception.
        killed: Whether the run was killed at the chosen step.
        failed: The exception that ended the run, and the step before it, or None.
        timed: Name patterns of logged values that measure time, with a name that each matches.
        unsaved: The tensors that no checkpoint holds, in the words of a warning; empty if there was none.
    """

    def __init__(self, file: Path) -> None:
        self.base: int | None = None
        self.begin: Values = {}
        self.steps: dict[int, Values] = {}
        self.logged: dict[int, Values] = {}
        self.is_whole = self.killed = False
        self.failed: str | None = None
        self.timed: dict[str, str] = {}
        self.unsaved = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.endswith("}"):  # the rank was killed while it wrote this line
                continue
            row = json.loads(line)
            kind, step, items = row["kind"], row["step"], row.get("items", ())
            values = {(part, name): text for part, name, text in items if part != TIMED}
            self.timed.update((name, text) for part, name, text in items if part == TIMED)
            if kind == "start":
                self.base, self.begin = step, values
            elif kind == "step":
                self.steps[step] = values
            elif kind == "logged":
                self.logged.setdefault(step, {}).update(values)
            elif kind == "failed":
                self.failed = f"after step {step}: {row['text']}"
            elif kind == "unsaved":
                self.unsaved = row["text"]
            else:
                self.is_whole, self.killed = self.is_whole or kind == "end", self.killed or kind == "killed"

    def values(self, step: int) -> Values:
        """Return the values of a step, those that are logged last."""
        return {**self.steps.get(step, {}), **self.logged.get(step, {})}

    def names(self) -> set[str]:
        """Return the names of all values, with those that measure time."""
        each = [self.begin, *self.steps.values(), *self.logged.values()]
        return {name for values in each for _, name in values} | {*self.timed, *self.timed.values()}


def read(directory: Path, kind: str) -> list[Recorded]:
    """Read the records of all ranks of a run."""
    found = sorted((directory / kind).glob("rank-*.jsonl"), key=lambda each: int(each.stem.split("-")[-1]))
    return [Recorded(each) for each in found]
