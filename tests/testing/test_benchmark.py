"""`drivetrain.benchmark`: rows of combinations in processes of their own, and the clock."""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.tasks import Regression, pairs, quiet

import drivetrain
from drivetrain import CompileConfig, ConfigError
from drivetrain.testing.benchmark import benchmark as turns
from drivetrain.testing.benchmark import turn
from drivetrain.testing.benchmark.turn import BlockClock

SHORT: dict[str, Any] = {"rounds": 1, "seconds": 0.01}


class Uncertain(Regression):
    def __init__(self, end: str = "") -> None:
        super().__init__()
        self.end = end

    def tokens(self, batch: Any) -> int:
        return 3 * len(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        if self.end == "raise":
            raise RuntimeError("no such column")
        if self.end == "exit":
            os._exit(3)
        return super().loss(outputs, batch)


def test_rows_of_combinations_that_run_raise_and_end_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    over = {"task.end": ["", "raise", "exit"], "strategy": ["cpu", "ddp", "cdu"]}
    found = drivetrain.benchmark(Uncertain, lambda: pairs(), over, **{**SHORT, "rounds": 2})
    rows = {(*row.settings.values(),): row for row in found.rows}
    assert (len(rows), [*tmp_path.iterdir()]) == (9, [])
    fine = rows["", "cpu"]
    step, rate, tokens = fine.step_seconds, fine.samples_per_second, fine.tokens_per_second
    assert None not in (step, rate, tokens, fine.first_step_seconds)
    assert step is not None
    assert rate is not None
    assert tokens is not None
    assert step.lowest == step.best <= step.highest
    assert (rate.best * step.best, tokens.best * step.best) == (pytest.approx(2), pytest.approx(6))
    assert (fine.peak_memory is not None, fine.failure, dict(fine.notes)) == (True, "", {})
    assert "no such column" in rows["raise", "cpu"].failure
    assert rows["exit", "ddp"].failure == "its process ended with exit code 3"
    assert "Did you mean 'cpu'?" in rows["", "cdu"].failure
    table = str(found).splitlines()
    assert table[0].split()[:4] == ["task.end", "strategy", "step", "samples/s"]
    assert table[5].split()[-2:] == ["failed", "[2]"]
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["step_seconds"]["best"] == step.best


def test_a_turn_without_a_result_is_ended() -> None:
    assert turns._in_process(functools.partial(time.sleep, 3600), 0.2)[1].endswith("within 0.2 s (limit)")


@pytest.mark.landing
def test_ranks_and_compiled_tasks() -> None:
    over = {"compile": [False, CompileConfig(backend="eager")], "devices": [1, 2]}
    rows = drivetrain.benchmark(Regression, pairs(), over, trainer=quiet(strategy="ddp"), **SHORT).rows
    assert [row.processes for row in rows] == [1, 2, 1, 2], [row.failure for row in rows]
    assert ["peak_memory" in row.notes for row in rows] == [False, False, True, True]


def test_the_clock_warms_up_waits_for_blocks_alone_and_keeps_the_fastest(monkeypatch) -> None:
    now, waits, costs = [0.0], [0], [5.0, *[1.0] * 4, *[0.1] * 200]
    monkeypatch.setattr(turn, "perf_counter", lambda: now[0])
    clock = BlockClock(10.0)
    clock.wait = lambda: waits.__setitem__(0, waits[0] + 1)
    for cost in costs:
        now[0] += cost if clock.blocks != 3 else cost / 2
        if clock.step():
            break
    assert (clock.first, clock.size, clock.blocks) == (5.0, 1, 20)
    assert clock.fastest == pytest.approx(0.05)
    assert (clock.steps, waits[0]) == (5 + 20, 22)
    slow = BlockClock(4.0)
    for _ in range(125):
        now[0] += 0.01
        slow.step()
    assert slow.size == 20  # from the last part of a warm-up of a second


def test_refusals() -> None:
    task: Any = Regression()
    for arguments, words in (
        ((Regression, pairs(), {"stratgy": ["cpu"]}), "Did you mean 'strategy'?"),
        ((Regression, pairs(), {"task.dropot": [0.1]}), "Did you mean 'task.dropout'?"),
        ((Regression, pairs(), {"data.size": [1]}), "made without 'size'"),
        ((Regression, pairs(), {"strategy": "cpu"}), "must be a list of the values"),
        ((Regression, pairs(), {"max_steps": [1]}), "the benchmark sets itself"),
        ((task, pairs(), {}), "each turn begins with a new one"),
    ):
        with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
            drivetrain.benchmark(*arguments, **SHORT)
    with pytest.raises(ConfigError, match="must be a Trainer or None, not 3"):
        drivetrain.benchmark(Regression, pairs(), {}, **{**SHORT, "trainer": 3})
