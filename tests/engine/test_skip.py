"""Skipped steps (`on_nonfinite="skip"`) and the buffers that they put back: as if they had never been."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fragile import GOOD, GRADIENT, INFINITE, INPUT, NAN, ONLY_LOSS, Fragile, LeftBehind, marked
from tests.support.outcome import outcome, weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import DataLoader, Subset

from drivetrain import CheckpointConfig, OptimizerConfig, TaskModule, Trainer
from drivetrain.core.errors import ConfigError, NonFiniteError, StrategyError
from drivetrain.engine.buffers import KeptBuffers
from drivetrain.engine.skip import all_finite
from drivetrain.run.nonfinite import IN_A_ROW
from drivetrain.strategies import STRATEGIES
from drivetrain.strategies.single import SingleDevice

BAD = (NAN, INFINITE, GRADIENT, ONLY_LOSS, INPUT)
# Two windows of one batch each, then a bad one, and so on.
MARKS = [mark for bad in BAD for mark in (GOOD, GOOD, bad)] + [GOOD, GOOD]
SKIPPED = {index: [] for index, mark in enumerate(MARKS) if mark != GOOD}


def in_batches(marks: list[int], size: int = 4) -> list[int]:
    return [mark if not index else GOOD for mark in marks for index in range(size)]


def skipping(**options: Any) -> Trainer:
    return quiet(**{"max_epochs": 1, "on_nonfinite": "skip", "log_every": "2 steps", **options})


def watched(task: TaskModule, data: Any = None, **options: Any) -> LeftBehind:
    watch = LeftBehind()
    trainer = skipping(callbacks=[*options.pop("callbacks", ()), watch], **{"max_grad_norm": 1.0, **options})
    trainer.fit(task, marked(in_batches(MARKS), 4) if data is None else data)
    return watch


@pytest.mark.parametrize(
    ("name", "precision"),
    [("sgd", "bf16-mixed"), ("adamw", "bf16-true"), ("adafactor", "64"), ("muon", "32")],
)
def test_skipped_steps_leave_nothing_behind(name: str, precision: str) -> None:
    options = {"momentum": 0.9} if name == "sgd" else {}
    watch = watched(Fragile(OptimizerConfig(name, lr=0.01, **options)), precision=precision)
    assert watch.applied == [mark == GOOD for mark in MARKS]
    assert watch.changed == SKIPPED


def test_a_bad_loss_does_not_lower_the_loss_scale() -> None:
    changed = watched(Fragile(), precision="16-mixed").changed
    # That the gradient of a finite loss is not finite is what the scale is there for.
    assert ".strategy.scaler.scale" in changed[MARKS.index(GRADIENT)]
    assert {index for index, names in changed.items() if not names} == {*SKIPPED} - {MARKS.index(GRADIENT)}


def test_one_bad_micro_batch_of_a_window_is_enough_to_skip_it() -> None:
    marks = in_batches([GOOD, GOOD, GOOD, NAN, GOOD, GRADIENT, GOOD, GOOD])
    options = {"gradient_accumulation_steps": 2, "micro_batch": 2, "max_grad_norm": None}
    watch = watched(Fragile(), marked(marks, 4), **options)
    assert watch.applied == [True, False, False, True]
    assert watch.changed == {1: [], 2: []}


def test_skipping_goes_on_as_if_the_bad_batches_had_not_been_there(tmp_path: Path, caplog: Any) -> None:
    data = marked(in_batches(MARKS), 4).dataset
    good = [4 * index + each for index, mark in enumerate(MARKS) if mark == GOOD for each in range(4)]
    found, skipped = [], []
    for directory, samples in (("all", range(4 * len(MARKS))), ("good", good)):
        task, trainer = Fragile(), skipping(loggers=("jsonl",), run_dir=tmp_path / directory)
        with caplog.at_level(logging.WARNING):
            result = trainer.fit(task, DataLoader(Subset(data, samples), batch_size=4))
        lines = (tmp_path / directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(each) for each in lines]
        skipped.append([row.pop("train/skipped_steps") for row in rows][-1])
        assert all(math.isfinite(value) for row in rows for value in row.values())
        found.append((weights(task), result.progress.steps, rows))
    assert found[0] == found[1]
    assert skipped == [len(BAD), 0]
    first, gradient = caplog.messages[0], caplog.messages[2]
    assert "step 2 was not made" in first
    assert "rank 0: 'loss'" in first
    assert "the gradient of 'net.0.weight'" in gradient


def test_a_resumed_run_skips_alike(tmp_path: Path) -> None:
    data = marked(in_batches(MARKS), 4, shuffle=True)
    policy = CheckpointConfig(every="2 steps", best=0, by=None)
    options = {"max_epochs": None, "checkpoint": policy, "loggers": ("csv", "jsonl")}
    for directory, stops in (("whole", (14,)), ("parts", (5, 14))):
        for steps in stops:
            trainer = skipping(max_steps=steps, run_dir=tmp_path / directory, **options)
            trainer.fit(Fragile(OptimizerConfig("adamw", lr=0.01)), data, resume="auto")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


class Rivals(TaskModule):  # two networks with a batch norm; in the third step the loss of one is NaN
    def __init__(self, bad: str) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)) for _ in range(2))
        self.bad, self.steps = bad, 0

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        for name, network in (("one", self.one), ("two", self.two)):
            factor = torch.nan if self.steps == 3 and name == self.bad else 1
            yield name, network(batch).square().mean() * factor

    def configure_optimizers(self) -> Any:
        return dict.fromkeys(("one", "two"), OptimizerConfig("sgd", lr=0.1))


def test_each_of_several_optimizers_is_skipped_for_itself_with_its_buffers() -> None:
    for bad, counts in (("one", [5, 6]), ("two", [6, 5])):
        task = Rivals(bad)
        result = skipping(log_every="1 step").fit(task, [torch.randn(4, 3) for _ in range(6)])
        assert result.progress.skipped == 0, "a step of which one optimizer stepped is made"
        assert all(map(math.isfinite, result.metrics.values()))
        assert [int(each[0].num_batches_tracked) for each in (task.one, task.two)] == counts


def test_a_large_gradient_is_finite_also_if_it_is_complex_or_sparse() -> None:
    large, nan = torch.full((4,), 3e38), torch.tensor([torch.nan])
    assert all(bool(each.all()) for each in all_finite([large, torch.zeros(2, dtype=torch.float64)]))
    twice = (torch.eye(2) * torch.nan).to_sparse()
    (found,) = all_finite([large, torch.tensor([1.0, -torch.inf]), nan, twice, torch.eye(2).to_sparse()])
    assert found.tolist() == [True, False, False, False, True]
    (found,) = all_finite((torch.full((2,), 3e38 + 3e38j), torch.tensor([complex(1, torch.nan)]).conj()))
    assert found.tolist() == [True, False]


# Ranks. Every window has a batch of each rank; the bad one is once that of the first, then of the second.
SHARED = [GOOD, GOOD, GOOD, NAN, GRADIENT, GOOD, GOOD, ONLY_LOSS, GOOD, GOOD]


def on_ranks(strategy: str, precision: str) -> Any:
    task = Fragile()
    options = {"strategy": strategy, "devices": 2, "precision": precision, "max_grad_norm": 0.5}
    watch = watched(task, marked(in_batches(SHARED), 4), **options)
    return watch.applied, watch.changed, weights(task)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "32"), ("fsdp", "bf16-mixed")])
def test_all_ranks_skip_what_one_of_them_has(strategy: str, precision: str) -> None:
    first, second = on_two_ranks(on_ranks, strategy, precision)
    assert first == second
    assert first[:2] == ([True, False, False, False, True], {1: [], 2: [], 3: []})


def test_refusals_of_skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = skipping()
    trainer.fit(Fragile(), marked(in_batches([GOOD, *[NAN] * (IN_A_ROW - 1), GOOD, NAN], 2), 2))
    row, none = (marked(in_batches(marks, 2), 2) for marks in ([GOOD, *[NAN] * IN_A_ROW], [NAN] * 3))
    kind: Any = object.__new__(STRATEGIES["deepspeed"])
    assert kind.refuses("skipping")
    monkeypatch.setattr(SingleDevice, "refusals", {})  # as of another package's strategy
    assert quiet()
    cases: dict[str, tuple[Any, ...]] = {
        "no such choice": (lambda: quiet(on_nonfinite="skp"), "'skp'", "'skip'"),
        "a strategy of another package": (skipping, "strategy 'single'"),
        "a row": (lambda: trainer.fit(Fragile(), row), f"tried {IN_A_ROW} times"),
        "every step": (lambda: trainer.fit(Fragile(), none), "all 3 steps", "nothing was trained"),
    }
    assert_refused((ConfigError, StrategyError, NonFiniteError), cases)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("none", None)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.counts = nn.Module()


ATTEMPTS: dict[str, Callable[[Buffered], object]] = {
    "move": lambda module: module.norm(torch.randn(4, 2)),
    "replace": lambda module: setattr(module, "mean", torch.ones(3)),
    "begin": lambda module: setattr(module, "none", torch.ones(1)),
    "leave out": lambda module: setattr(module, "mean", None),
    "register": lambda module: module.counts.register_buffer("steps", torch.ones(1), persistent=False),
    "delete": lambda module: delattr(module, "passing"),
}


def state(module: nn.Module) -> list[tuple[str, list[float] | None]]:
    buffers = [(f"{p}.{name}", b) for p, o in module.named_modules() for name, b in o._buffers.items()]
    return [(name, None if buffer is None else buffer.flatten().tolist()) for name, buffer in buffers]


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=list(ATTEMPTS))
def test_an_attempt_is_undone_and_a_good_one_is_kept(attempt: Callable[[Buffered], object]) -> None:
    module, kept, alone = Buffered(), KeptBuffers(), Buffered()
    mean = module.mean
    for _ in range(2):
        before, keys = state(module), list(module.state_dict())
        kept.keep(module)
        attempt(module)
        assert state(module) != before
        kept.put_back()
        assert state(module) == before
        assert module.mean is mean
        assert list(module.state_dict()) == keys
    attempt(module)
    after = state(module)
    kept.keep(module)
    kept.put_back()
    assert state(module) == after
    attempt(alone)
    assert list(module.state_dict()) == list(alone.state_dict())
