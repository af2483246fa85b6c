"""All rows under pytest-benchmark: `pytest benchmarks --benchmark-only`.

The time is that of a step, as `run.py` takes it: by the clock that hears of every loss, so that building a
trainer is in no figure. A row of a group is a contestant. They are figures, not tests: nothing here asserts a
time.

    pytest benchmarks --benchmark-only --benchmark-autosave      # keep these figures
    pytest benchmarks --benchmark-only --benchmark-compare       # beside those kept last
    pytest benchmarks --benchmark-only -k "bare and drivetrain"  # some
"""

from __future__ import annotations

from typing import Any

import pytest

from peers import ROSTER, Peer, installed, load
from rows import ROWS, Row
from turns import turn

STEPS = 100
ROUNDS = 5


class Spent:
    """A clock of what contestants spent, in place of the wall's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, peer: Peer, row: Row) -> None:
        """Let a contestant take a turn."""
        self.seconds += turn(peer, row, STEPS).seconds


SPENT = Spent()


def spent() -> float:
    """Seconds so far."""
    return SPENT.seconds


@pytest.mark.benchmark(timer=spent)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in installed() if not ROSTER[name].apart])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(benchmark: Any, row: Row, name: str) -> None:
    """Time one row."""
    peer = load(name)
    if set(row.needs) & set(peer.lacks):
        pytest.skip(f"{name} has no part for it")
    benchmark.group = f"{row.table}: {row.name}"
    benchmark.pedantic(SPENT.run, args=(peer, row), rounds=ROUNDS, iterations=1, warmup_rounds=1)
