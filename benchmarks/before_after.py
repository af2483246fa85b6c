"""Two checkouts of drivetrain, measured in pairs: whether a change has made a step slower.

    python benchmarks/before_after.py OLD NEW [--only TEXT ...] [--starts 10] [--rounds 3] [--steps 300]

Each checkout trains the rows of `rows.py` in processes of its own, started anew `--starts` times, because the
layout of a process's memory changes a small step by some percent. In a round both checkouts take a turn,
and so does the hand-written loop beside each, in a random order. A row's figure is the median over all
rounds of new / old, in time on the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import HAND, OURS
from rows import MODELS, ROWS, Row


class Checkout:
    """A process that trains with one checkout's package and that checkout's own benchmarks."""

    def __init__(self, root: Path) -> None:
        paths = [str(root / "package"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, str(root / "benchmarks" / "place.py"), "cpu", HAND, OURS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def microseconds(self, name: str, row: Row, steps: int) -> float:
        """Return the microseconds of a step in one turn of a contestant."""
        question = {"ask": "turn", "name": name, "row": row.name, "steps": steps}
        print(json.dumps(question), file=self._questions, flush=True)
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError("the process of a checkout has ended: its error is above")
        seconds: float = json.loads(answer)["seconds"]
        return seconds * 1e6

    def close(self) -> None:
        """End the process."""
        self._questions.close()
        self._process.wait(timeout=60)
        self._answers.close()


def measure(roots: dict[str, Path], rows: list[Row], plan: Any) -> dict[str, list[dict[str, float]]]:
    """Return for each row one mapping a round: "old", "new" and "hand" to microseconds."""
    found: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
    for _ in range(plan.starts):
        checkouts = {name: Checkout(root) for name, root in roots.items()}
        for row in rows:
            for _ in range(plan.rounds):
                turns = [(name, peer) for name in checkouts for peer in (HAND, OURS)]
                spent = {
                    turn: checkouts[turn[0]].microseconds(turn[1], row, plan.steps)
                    for turn in random.sample(turns, len(turns))
                }
                hand = statistics.mean(spent[name, HAND] for name in checkouts)
                found[row.name].append({"hand": hand, **{name: spent[name, OURS] for name in checkouts}})
        for each in checkouts.values():
            each.close()
    return found


def line(name: str, turns: list[dict[str, float]]) -> str:
    """Return a row of the table."""
    ratios = sorted(each["new"] / each["old"] for each in turns)
    hand, old, new = (statistics.median(each[key] for each in turns) for key in ("hand", "old", "new"))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return (
        f"| {name} | {hand:,.1f} | {old:,.1f} | {new:,.1f} | {statistics.median(ratios):.3f}"
        f" ({low:.3f} .. {high:.3f}) |"
    )


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the root of a checkout")
    parser.add_argument("new", type=Path, help="the root of another")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name has one of these texts")
    parser.add_argument("--starts", type=int, default=10, help="processes of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns in each process (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="timed in a turn (default: %(default)s)")
    plan = parser.parse_args(argv)
    rows = [row for row in ROWS if any(text.lower() in row.name.lower() for text in plan.only)]
    rows = rows or [row for row in ROWS if row.table != MODELS]
    found = measure({"old": plan.old.resolve(), "new": plan.new.resolve()}, rows, plan)
    print(f"Microseconds, medians of {plan.starts * plan.rounds} rounds; new / old with its quartiles.\n")
    print("| row | hand-written | old | new | new / old |\n|---|---:|---:|---:|---:|")
    for row in rows:
        print(line(row.name, found[row.name]))


if __name__ == "__main__":
    main()
