"""`drivetrain.benchmark`: rows of combinations in processes of their own, the clock, and the loop by hand."""

import copy
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

import drivetrain
from drivetrain import CompileConfig, ConfigError, OptimizerConfig
from drivetrain.testing.benchmark import benchmark as turns
from drivetrain.testing.benchmark import turn
from drivetrain.testing.benchmark.turn import BlockClock, Probe, watched

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
    fine, ddp = rows["", "cpu"], rows["", "ddp"]
    step, rate, tokens = fine.step_seconds, fine.samples_per_second, fine.tokens_per_second
    assert None not in (step, rate, tokens, fine.hand_written_seconds, fine.first_step_seconds)
    assert step is not None
    assert rate is not None
    assert tokens is not None
    assert step.lowest == step.best <= step.highest
    assert (rate.best * step.best, tokens.best * step.best) == (pytest.approx(2), pytest.approx(6))
    assert (fine.peak_memory is not None, fine.failure, dict(fine.notes)) == (True, "", {})
    assert ddp.notes == {
        "share_of_hand_written": "no hand-written loop: strategy 'ddp' wraps or shards the task"
    }
    assert "no such column" in rows["raise", "cpu"].failure
    assert rows["exit", "ddp"].failure == "its process ended with exit code 3"
    assert "Did you mean 'cpu'?" in rows["", "cdu"].failure
    table = str(found).splitlines()
    assert table[0].split()[:4] == ["task.end", "strategy", "step", "samples/s"]
    assert "[1] no hand-written loop: strategy 'ddp' wraps or shards the task" in table
    assert ("[1]" in table[2], table[5].split()[-2:]) == (True, ["failed", "[3]"])
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


def test_the_loop_by_hand_makes_the_steps_of_a_fit() -> None:
    batches = [(each, each.sum(1, keepdim=True)) for each in torch.randn(7, 4, 4)]
    task = Regression(OptimizerConfig("adamw", lr=0.1, max_grad_norm=0.01))
    trainer = quiet(gradient_accumulation_steps=2)
    settings = {"gradient_accumulation_steps": 2, "max_steps": 4}
    whole = copy.deepcopy(task)
    quiet(**settings).fit(whole, batches)
    probe = Probe(BlockClock(0.0))
    quiet(**{**settings, "max_steps": 2}, callbacks=[probe]).fit(task, batches)
    steps = turn._loop(trainer, task, batches[4:], probe.engine)
    for _ in range(2):
        next(steps)
    for one, other in zip(task.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Stream:
    def __iter__(self) -> Any:
        return iter(pairs())


@pytest.mark.parametrize(
    ("data", "settings", "why"),
    [
        (iter(pairs()), {}, "can be read once"),
        (Stream(), {}, ""),
        (pairs().dataset, {"batch_size": 2, "num_workers": 0}, ""),
        (pairs(), {"micro_batch": 1}, "micro_batch=1"),
        (pairs(), {"precision": "16-mixed"}, "16-mixed"),
    ],
)
def test_what_a_hand_written_loop_can_be_compared_with(
    data: Any, settings: Any, why: str, tmp_path: Path
) -> None:
    probe, task = Probe(BlockClock(1e-9)), Regression()
    trainer = watched(quiet(**settings), probe, str(tmp_path))
    trainer.fit(task, [(torch.randn(2, 4), torch.randn(2, 1))] if why else data)
    found = turn._obstacle(trainer, task, data, probe.engine)
    assert (why in found, bool(found)) == (True, bool(why))
    if not why:
        assert turn._by_hand(trainer, task, data, probe.engine, 1e-9) > 0


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
