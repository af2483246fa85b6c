"""What a run measures, section by section; each gives its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import parts
from peers import HAND, OURS
from report import NONE, Cell, Table, lowest
from rows import BY_NAME, EVALUATION, GROWTH, MODELS, ROWS, UPDATE, Row
from starts import GOAL, IMPORT_GOAL, Start, starts
from turns import Figure, Turns


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        names: The contestants.
        only: Texts; a row is measured if one of them is in its table's title or its name. None for all.
        rounds: Turns of each contestant in a row.
        steps: Of the smallest models in a turn.
        starts: Interpreters of each contestant.
        gigabytes: Of a checkpoint.
        saves: How often each way of saving is measured.
        several: Steps of two processes, of the smallest model and of the GPT.
        clock: "wall", or "cpu" for the time on a processor in rows in which each contestant runs alone.
    """

    names: list[str]
    only: list[str]
    rounds: int = 9
    steps: int = 500
    starts: int = 5
    gigabytes: float = 1.2
    saves: int = 5
    several: tuple[int, int] = (3000, 40)
    clock: str = "wall"

    def wants(self, table: str, row: str = "") -> bool:
        """Whether a row is asked for."""
        text = f"{table}: {row}".lower()
        return not self.only or any(each.lower() in text for each in self.only)


WORDS = {
    UPDATE: "Microseconds that a step adds to the hand-written loop's",
    GROWTH: "Microseconds that a step adds to the hand-written loop's",
    EVALUATION: "Microseconds that a batch adds to the hand-written loop's",
    MODELS: "Times the hand-written loop's step",
}


def turns(plan: Plan) -> Iterator[Table]:
    """All rows in which contestants take turns, and their calls."""
    wanted = {table: [r for r in ROWS if r.table == table and plan.wants(table, r.name)] for table in WORDS}
    calls = [name for name in _COUNTED if plan.wants(CALLS, name)]
    if not calls and not any(wanted.values()):
        return
    with Turns(plan.names) as there:
        if calls:
            yield _calls(there, calls)
        for title, rows in wanted.items():
            if rows:
                yield _table(there, plan, title, rows)


def _table(there: Turns, plan: Plan, title: str, rows: list[Row]) -> Table:
    table = Table(
        title,
        f"{WORDS[title]} (whose column says how long that takes): medians of {plan.rounds} rounds, and"
        " their range.",
        "",
        [*plan.names, "goal for ours"],
    )
    for row in rows:
        figures = {each.name: each for each in there.measure(row, plan.rounds, plan.steps)}
        cells = [_cell(row, figures[name]) if name in figures else NONE for name in plan.names]
        table.rows.append((row.name, [*cells, Cell(row.goal)]))
        note = lowest(row.name, {name: each.added for name, each in figures.items()})
        if note:
            table.notes.append(note)
    table.notes += _missing(there, rows)
    return table


def _cell(row: Row, figure: Figure) -> Cell:
    if figure.name == HAND:
        return Cell(f"{figure.spent:,.1f} us")
    if row.table == MODELS:
        return Cell(f"{figure.ratio:.3f}", round(figure.ratio, 4))
    spread = f"{figure.lowest:+,.1f} .. {figure.highest:+,.1f}"
    return Cell(f"{figure.added:+,.1f} ({spread})", round(figure.added, 2))


def _missing(there: Turns, rows: list[Row]) -> list[str]:
    needed = {each for row in rows for each in row.needs}
    found = []
    for name in there.names:
        why = [f"{what}: {reason}" for what, reason in there.lacks[name].items() if what in needed]
        if why:
            found.append(f"Not of {name}: {'; '.join(why)}.")
    return found


CALLS = "Calls"
_TAKEN_APART = ["in memory, bare", "DataLoader, bare", "in memory, everything on"]
_COUNTED = ["in memory, bare", "DataLoader, bare", "in memory, everything on"]


def where(plan: Plan) -> Iterator[Table]:
    """A step's parts; see `parts.py`."""
    for name in _TAKEN_APART if OURS in plan.names else ():
        if plan.wants(parts.TITLE, name):
            yield parts.table(BY_NAME[name], plan.rounds, plan.steps)


def _calls(there: Turns, names: list[str]) -> Table:
    table = Table(
        CALLS,
        "Python calls and C calls of a step, the user's and torch's own included, as `sys.setprofile`"
        " counts them: the median step of 20.",
        "",
        list(there.names),
    )
    for name in names:
        found = there.calls(BY_NAME[name])
        cells = [
            Cell(f"{found[each]['python']} + {found[each]['c']}", sum(found[each].values()))
            if each in found
            else NONE
            for each in there.names
        ]
        table.rows.append((name, cells))
        note = lowest(name, {each: float(sum(counts.values())) for each, counts in found.items()})
        if note:
            table.notes.append(note)
    return table


STARTS = "Start"
_STARTED = "import, first step, memory"


def first_steps(plan: Plan) -> Iterator[Table]:
    """Imports, the first step, memory."""
    if not plan.wants(STARTS, _STARTED):
        return
    found = starts(plan.names, plan.starts, plan.clock == "cpu")
    hand = found[HAND]
    table = Table(
        STARTS,
        f"From the command to the end of the first step, and the memory then, in interpreters of their own:"
        f" medians of {plan.starts}.",
        "",
        [*plan.names, "goal for ours"],
    )
    columns: list[tuple[str, str, Callable[[Start], float | None]]] = [
        ("torch's import, seconds", "", lambda each: each.torch),
        ("imports beside torch's, seconds", "", lambda each: each.imports - hand.imports),
        (
            "the same as a part of torch's",
            f"at most {IMPORT_GOAL}",
            lambda each: (each.imports - hand.imports) / each.torch,
        ),
        ("first step, seconds", f"{hand.first + GOAL:.2f} (+{GOAL})", lambda each: each.first),
        ("memory, MiB", "", lambda each: each.memory),
    ]
    for name, goal, get in columns:
        values = {each: get(found[each]) for each in plan.names}
        cells = [NONE if value is None else Cell(f"{value:.4g}", value) for value in values.values()]
        table.rows.append((name, [*cells, Cell(goal)]))
        note = lowest(name, {each: value for each, value in values.items() if value is not None})
        if note:
            table.notes.append(note)
    yield table


CHECKPOINTS = "Checkpoints"
_SAVED = ["throughput", "stall"]


def checkpoints(plan: Plan) -> Iterator[Table]:
    """Saving, waiting for an asynchronous save, loading; see `checkpoint.py`, which measures more."""
    wanted = [part for part in _SAVED if plan.wants(CHECKPOINTS, part)]
    table = Table(
        CHECKPOINTS,
        f"{plan.gigabytes:g} GB of a GPT's weights and AdamW's state; medians of {plan.saves} rounds.",
        "",
        ["median", "range", "beside a plain write, read or copy", "goal for ours"],
    )
    for part in wanted:
        for row in _saved(plan, part):
            ratio = row["ratio"]
            cells = [
                Cell(f"{row['median']:.4g}", row["median"]),
                Cell(f"{row['lowest']:.4g} .. {row['highest']:.4g}"),
                NONE if ratio is None else Cell(f"{ratio:.2f}", ratio),
                Cell(row["goal"]),
            ]
            table.rows.append((f"{row['table']}: {row['name']}", cells))
    if wanted:
        yield table


def _saved(plan: Plan, part: str) -> list[dict[str, Any]]:
    """Rows of a table of `checkpoint.py`, whose process is one of its own: it changes how memory is given."""
    program = str(Path(__file__).with_name("checkpoint.py"))
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        found = Path(directory, "found.json")
        amount = ["--gigabytes", str(plan.gigabytes), "--rounds", str(plan.saves)]
        command = [sys.executable, program, *amount, "--only", part, "--directory", directory]
        subprocess.run([*command, "--json", str(found)], check=True, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))["rows"][directory]
    return rows


SEVERAL = "Two processes"
_CASES = [each for each in distributed.CASES if each.strategy in ("ddp", "fsdp") and not each.weighted]


def several(plan: Plan) -> Iterator[Table]:
    """DDP and FSDP on two processes of this machine; see `distributed.py`, which measures more."""
    cases = [case for case in _CASES if plan.wants(SEVERAL, case.name)]
    names = [each for each in plan.names if each in (HAND, OURS, "Lightning Fabric", "Accelerate")]
    table = Table(
        SEVERAL,
        "A step on two processes of this machine, gloo: microseconds that are added, and times the"
        " hand-written loop's.",
        "",
        [*names, "goal for ours"],
    )
    for case in cases:
        steps = plan.several[0 if "Linear" in case.name else 1]
        found = distributed.measure(case, 2, steps)["contestants"]
        cells = [Cell(f"{found[HAND]['us']:,.0f} us")]
        for name in names[1:]:
            each = found.get(name)
            text = "" if each is None else f"{each['added_us']:+,.0f} us, {each['ratio']:.3f}"
            cells.append(NONE if each is None else Cell(text, each["ratio"]))
        table.rows.append((case.name, [*cells, Cell(case.goal)]))
        note = lowest(case.name, {name: each["ratio"] for name, each in found.items()})
        if note:
            table.notes.append(note)
    if cases:
        yield table


SECTIONS: list[Callable[[Plan], Iterator[Table]]] = [first_steps, several, turns, where, checkpoints]
"""In their order: two processes are forked, and so they come while nothing but torch is imported here."""


def choices() -> list[str]:
    """All that `Plan.only` may choose from, as table and row."""
    taking_turns = [(row.table, row.name) for row in ROWS]
    others = {
        CALLS: _COUNTED,
        parts.TITLE: _TAKEN_APART,
        STARTS: [_STARTED],
        SEVERAL: [each.name for each in _CASES],
        CHECKPOINTS: _SAVED,
    }
    more = [(table, name) for table, names in others.items() for name in names]
    return [f"{table}: {name}" for table, name in [*taking_turns, *more]]
