"""Tables in Markdown, and what they are made of as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from peers import HAND, OURS, versions


@dataclass(frozen=True)
class Cell:
    """A figure of a table.

    Attributes:
        text: As it is written.
        value: As a number, for plots and comparisons.
    """

    text: str
    value: float | None = None


NONE = Cell("-")


@dataclass
class Table:
    """A table: rows of what was measured, columns of contestants, or the other way round.

    Attributes:
        title: Its heading.
        unit: What the figures are, in words.
        corner: The first column's heading.
        columns: The others'.
        rows: The first cell's text, and a cell for each column.
        notes: Sentences below it.
    """

    title: str
    unit: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as it is written to a page."""
        lines = [
            f"## {self.title}",
            "",
            f"{self.unit}",
            "",
            f"| {self.corner} | {' | '.join(self.columns)} |",
            f"| --- |{' ---: |' * len(self.columns)}",
        ]
        lines += [f"| {name} | {' | '.join(cell.text for cell in cells)} |" for name, cells in self.rows]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])

    def data(self) -> dict[str, Any]:
        """The table's numbers."""
        rows = [
            {"row": name, **{column: cell.value for column, cell in zip(self.columns, cells, strict=True)}}
            for name, cells in self.rows
        ]
        return {"title": self.title, "unit": self.unit, "rows": rows, "notes": self.notes}


def lowest(name: str, figures: dict[str, float]) -> str:
    """A sentence where ours is not the lowest of the frameworks, or nothing.

    Args:
        name: What was measured.
        figures: By contestant; less is better.
    """
    ours = figures.get(OURS)
    others = {each: figure for each, figure in figures.items() if each not in (OURS, HAND)}
    if ours is None or not others or ours <= min(others.values()):
        return ""
    best = min(others, key=lambda each: others[each])
    return f"{name}: {best} is lower than ours."


def host() -> str:
    """The machine, in words."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in information.read_text("utf-8").splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    load = f"; load average at the start {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{model}, {os.cpu_count()} cores{gpu}, Python {platform.python_version()}, one thread{load}"


class Report:
    """What a run has found so far, in a directory.

    Attributes:
        directory: Where `results.md` and `results.json` are.
        tables: All of them.
    """

    def __init__(self, directory: Path, command: str) -> None:
        self.directory = directory
        self.command = command
        self.host = host()
        self.begun = datetime.now(UTC)
        self.tables: list[Table] = []
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, table: Table) -> None:
        """Keep a table, print it, and write all so far: what a run that is stopped has found is not lost."""
        self.tables.append(table)
        print(table.markdown(), flush=True)
        (self.directory / "results.md").write_text(self.markdown(), encoding="utf-8")
        (self.directory / "results.json").write_text(json.dumps(self.data(), indent=2), encoding="utf-8")

    def markdown(self) -> str:
        """The whole page."""
        found = ", ".join(f"{package} {version}" for package, version in versions().items())
        head = [
            "# Benchmarks",
            "",
            f"`{self.command}`, {self.begun:%Y-%m-%d %H:%M} UTC. {self.host}.",
            "",
            f"{found}.",
            "",
        ]
        return "\n".join(head) + "\n".join(table.markdown() for table in self.tables)

    def data(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "command": self.command,
            "begun": self.begun.isoformat(),
            "host": self.host,
            "versions": versions(),
            "tables": [table.data() for table in self.tables],
        }
