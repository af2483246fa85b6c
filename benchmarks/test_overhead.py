"""The rows of `overhead.py` under pytest-benchmark: `pytest benchmarks --benchmark-only`.

Each row is run twice, hand-written and ours, in a group of its own; one round is 300 updates after a warm-up,
so the table's times are those of a round. They are figures, not tests: nothing here asserts a time.
"""

from __future__ import annotations

from typing import Any

import pytest

from overhead import CASES, Case

UPDATES = 300


@pytest.mark.parametrize("contestant", ["hand", "ours"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_overhead(benchmark: Any, case: Case, contestant: str) -> None:
    """Time one row."""
    benchmark.group = case.name
    run = getattr(case, contestant)
    seconds = benchmark.pedantic(run, args=(UPDATES,), rounds=5, iterations=1, warmup_rounds=1)
    benchmark.extra_info["us_per_update"] = seconds * 1e6
