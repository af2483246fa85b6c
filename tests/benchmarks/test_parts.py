"""Where the time of an update goes: parts that are disjoint and add up."""

from __future__ import annotations

import pytest
import torch

from drivetrain.engine import engine
from parts import BACKWARD, LOOP, MODEL, OPTIMIZER, PARTS, WINDOW, ZERO, Parts, measure, table
from peers import HAND, OURS, load
from rows import BY_NAME
from workloads import Clock


def test_time_is_charged_to_the_innermost_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(Clock, "read", lambda: now)
    parts = Parts(0, 1)
    inner = parts.timed(MODEL, work)

    def around() -> None:
        work(1.0)
        inner(2.0)
        work(4.0)

    parts.timed(BACKWARD, around)()
    work(8.0)
    inner(16.0)
    spent = {part: seconds for part, seconds in parts.spent.items() if seconds}
    assert spent == {BACKWARD: 5.0, MODEL: 18.0, LOOP: 8.0}


@pytest.mark.parametrize("name", [HAND, OURS])
def test_each_loop_has_its_parts_and_is_left_as_it_was(name: str) -> None:
    before = torch.Tensor.backward, engine.read_output, engine.Engine.train_step
    found = measure(BY_NAME["in memory, bare"], load(name), 50)
    assert set(found) == set(PARTS)
    of_both = {WINDOW, MODEL, BACKWARD, OPTIMIZER, LOOP}
    assert all(found[part] > 0 for part in of_both)
    others = {part for part in PARTS if part not in of_both and found[part] != 0}
    assert others == ({ZERO} if name == HAND else set(PARTS) - of_both - {ZERO})
    assert (torch.Tensor.backward, engine.read_output, engine.Engine.train_step) == before


def test_the_table_has_a_row_for_each_part_and_both_sums() -> None:
    made = table(BY_NAME["in memory, everything on"], 1, 50)
    assert [name for name, _ in made.rows][: len(PARTS)] == list(PARTS)
    numbers = [cells[1].value for _, cells in made.rows]
    assert numbers[-2] == pytest.approx(sum(each or 0.0 for each in numbers[:-2]), abs=0.1)
    assert numbers[-1] is not None
    assert numbers[-1] > 0
