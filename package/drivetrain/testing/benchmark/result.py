"""The rows of a benchmark, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain.core.messages import columns, sized
from drivetrain.core.notebook.html import Html, escaped, html_table
from drivetrain.core.types import Json
from drivetrain.run.settings import brief, plain


@dataclass(frozen=True)
class ValueRange:
    """A value over the rounds of a benchmark.

    Attributes:
        best: The value of the best round: the shortest time, the highest rate, the least memory.
        lowest: The lowest.
        highest: The highest.
    """

    best: float
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """The values of one combination of settings; None for one that could not be measured.

    Attributes:
        settings: The combination, by name.
        failure: Why the combination could not run; empty if it could.
        notes: Why a value is missing, by its name.
        step_seconds: Seconds of a step, in the fastest block of each round.
        samples_per_second: Samples of all processes.
        tokens_per_second: Tokens of all processes, if the task counts them in `tokens`.
        peak_memory: Bytes of one process at the peak of a step. On a GPU torch's allocator counts them; on a
            CPU they are the bytes of the tensors that `MemoryReport` finds.
        first_step_seconds: Seconds from before the task is made to the end of the first step.
        processes: The number of processes.
        threads: The threads of each process.
        device: The device of the first process.
    """

    settings: Mapping[str, Any]
    failure: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    step_seconds: ValueRange | None = None
    samples_per_second: ValueRange | None = None
    tokens_per_second: ValueRange | None = None
    peak_memory: ValueRange | None = None
    first_step_seconds: ValueRange | None = None
    processes: int = 1
    threads: int = 1
    device: str = ""

    @classmethod
    def of_rounds(cls, settings: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> BenchmarkRow:
        """Return the row of what each round has measured."""
        values: dict[str, Any] = {}
        for name in _COLUMNS:
            if found := [each[name] for each in rounds if name in each]:
                best = max if name.endswith("_per_second") else min
                values[name] = ValueRange(best(found), min(found), max(found))
        last = {name: rounds[-1][name] for name in ("notes", "processes", "threads", "device")}
        return cls(settings=settings, **values, **last)


_COLUMNS = {
    "step_seconds": "step",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "peak_memory": "memory",
    "first_step_seconds": "first step",
}


@dataclass(frozen=True)
class BenchmarkResult:
    """The rows of a benchmark. `print(result)` shows them as a table.

    Attributes:
        rows: One for each combination, in their order.
        rounds: The number of rounds.
    """

    rows: Sequence[BenchmarkRow]
    rounds: int

    def _repr_html_(self) -> str:
        """Return the rows as a table with a bar for the time of a step, which a notebook shows."""
        (head, *rows), notes = self._table()
        best = [0.0 if row.step_seconds is None else row.step_seconds.best for row in self.rows]
        bars = [
            f'<progress value="{each}" max="{max(best) or 1}"></progress>' if each else "" for each in best
        ]
        table = html_table(head, [(*cells, Html(bar)) for cells, bar in zip(rows, bars, strict=True)])
        return "<br>".join([table, *map(escaped, notes)])

    def __str__(self) -> str:
        lines, notes = self._table()
        right = range(len(self.rows[0].settings), len(lines[0]) - 1)
        return "\n".join([*columns(lines, right), "", *notes])

    def _table(self) -> tuple[list[list[str]], list[str]]:
        """Return the lines of the table, the head first, and the notes below it."""
        names = list(self.rows[0].settings)
        measured = {name for row in self.rows for name in (*_COLUMNS, *row.notes) if _has(row, name)}
        kept = [each for each in _COLUMNS if each in measured]
        lines = [[*names, *(_COLUMNS[each] for each in kept), ""]]
        whys: dict[str, str] = {}
        for row in self.rows:
            cells = [_cell(each, getattr(row, each)) for each in kept]
            for index, each in enumerate(kept):
                if each in row.notes:
                    cells[index] = whys.setdefault(row.notes[each], f"[{len(whys) + 1}]")
            failed = f"failed {whys.setdefault(row.failure, f'[{len(whys) + 1}]')}" if row.failure else ""
            lines.append([*(shown(row.settings[name]) for name in names), *cells, failed])
        about = f"the best of {self.rounds} rounds, and the range of all" if self.rounds > 1 else "one round"
        return lines, [about, *(f"{number} {why}" for why, number in whys.items())]

    def to_json(self) -> dict[str, Json]:
        """Return the rows as JSON."""
        rows: list[Json] = [
            {**asdict(row), "settings": plain(row.settings), "notes": dict(row.notes)} for row in self.rows
        ]
        return {"rounds": self.rounds, "rows": rows}


def _has(row: BenchmarkRow, name: str) -> bool:
    return name in row.notes or getattr(row, name) is not None


def shown(value: Any) -> str:
    """Return a setting's value as a short text."""
    return value if isinstance(value, str) else brief(value)[:60]


def _cell(name: str, value: ValueRange | None) -> str:
    if value is None:
        return "-"
    if name == "peak_memory":
        return sized(value.best)
    if name.endswith("_per_second"):
        return f"{value.best:,.0f}"
    factor, unit = (1.0, " s") if value.best >= 1 else (1e3, " ms")
    best, low, high = (f"{each * factor:.4g}" for each in (value.best, value.lowest, value.highest))
    return f"{best}{unit}" if low == high else f"{best}{unit} ({low} to {high})"
