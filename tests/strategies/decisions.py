"""Checks that all processes take the same decisions: by logged values, by time, and when one rank stops."""

from __future__ import annotations

import math
from typing import Any

import torch

from drivetrain.callbacks import Callback, EarlyStopping
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS
from drivetrain.testing.strategies.job import Job, Outcome, assert_same_on_all_ranks
from drivetrain.testing.strategies.tasks import Sequences, Tokens


class CompareRanks(Callback):
    """Compares the values that decisions depend on, before any rank decides."""

    def __init__(self) -> None:
        self.evaluated: list[tuple[int, float]] = []

    def on_step_end(self, run: Any) -> None:
        counts = {name: value for name, value in run.progress.to_json().items() if name != "seconds"}
        self._compare((counts, run.learning_rates()), "on_step_end")

    def on_log(self, run: Any) -> None:
        self._compare(sorted(run.logged.items()), "on_log")

    def on_evaluation_end(self, run: Any) -> None:
        values = run.evaluation.values
        self._compare(sorted(values.items()), "on_evaluation_end")
        self.evaluated.append((run.progress.steps, values["validation/loss"]))

    def on_save(self, run: Any) -> None:
        seconds = run.progress.seconds if run.by_time else None
        self._compare((run.stop_reason, seconds), f"on_save after step {run.progress.steps}")

    def _compare(self, value: Any, hook: str) -> None:
        if torch.distributed.is_initialized():
            assert_same_on_all_ranks(value, f"the values that decide in {hook}")


def _fit_and_compare(job: Job, alone: bool, *callbacks: Any, **options: Any) -> tuple[Outcome, CompareRanks]:
    """Run a fit with a validation after every step, unless `options` give another interval."""
    comparison = CompareRanks()
    shown = (*(() if alone else (comparison,)), *callbacks)
    task = Tokens(schedule="reduce_on_plateau")
    data = job.sequences(alone)
    found = job.fit(
        alone, task, data, validation=data, callbacks=shown, **{"validate_every": "1 step", **options}
    )
    if not alone:
        result = found.result
        assert_same_on_all_ranks((result.stop_reason, result.progress.steps), "why and when the run ended")
    return found, comparison


class StopBelow(Callback):
    def __init__(self, bound: float) -> None:
        self.bound = bound

    def on_log(self, run: Any) -> None:
        if run.logged.get("train/loss", self.bound + 1) <= self.bound:
            run.stop("low enough")


def callbacks_decide_the_same(job: Job) -> None:
    """Early stopping, best checkpoints, a plateau schedule and a callback agree with one process."""
    # At every other validation, rank-dependent values are logged too.
    stops = {"max_epochs": 4, "log_every": "2 steps"}
    directory = job.scratch / "decisions"
    # mode="max" with a falling loss: the schedule lowers the rates, then early stopping ends the run.
    policy = CheckpointConfig(every=None, best=2, keep_last=1, mode="max")
    alone, _ = _fit_and_compare(job, True, EarlyStopping(mode="max", patience=6), **stops)
    found, comparison = _fit_and_compare(
        job, False, EarlyStopping(mode="max", patience=6), checkpoint=policy, run_dir=directory, **stops
    )
    _same_decisions(job, found, alone, "early stopping")
    assert len({rates["lr"] for rates in found.record.rates}) > 1, "the schedule never lowered the rate"
    entries = read_index(str(directory / CHECKPOINTS)) or []
    kept = sorted(each.step for each in entries if each.best)
    best = sorted(step for step, _ in sorted(comparison.evaluated, key=lambda pair: -pair[1])[:2])
    assert kept == best, f"of {comparison.evaluated} the checkpoints {kept} were kept"
    losses = [values["train/loss"] for _, values in alone.record.logged if "train/loss" in values]
    bound = min(losses[:3]) + 1e-4
    alone, _ = _fit_and_compare(job, True, StopBelow(bound), **stops)
    found, _ = _fit_and_compare(job, False, StopBelow(bound), **stops)
    _same_decisions(job, found, alone, "a callback that reads the log")


def _same_decisions(job: Job, found: Outcome, alone: Outcome, what: str) -> None:
    if job.inexact:
        return
    steps = alone.result.progress.steps
    mine = found.result.progress.steps
    assert mine == steps, f"{what} on rank {job.rank} ended the run after step {mine}, alone {steps}"
    job.assert_close(found.record.rates, alone.record.rates, f"the rates ({what})")


class ClockAhead(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, run: Any) -> None:
        if run.progress.steps == 3 and run.engine.strategy.rank == self.rank:
            run.origin -= 7200


def all_ranks_have_one_clock(job: Job) -> None:
    """Intervals in time are due after the same step on all ranks, even if their clocks differ."""
    for rank in sorted({0, job.world_size - 1}):
        options = {"max_time": "1 hour", "validate_every": "1 hour", "log_every": "1 hour"}
        found, comparison = _fit_and_compare(job, False, ClockAhead(rank), **options)
        steps, evaluated = found.result.progress.steps, [step for step, _ in comparison.evaluated]
        whole = 2 * math.ceil(len(Sequences()) / job.step)
        expected: tuple[int, list[int]] = (3, [3]) if rank == 0 else (whole, [whole])
        assert (steps, evaluated) == expected, (
            f"with rank {rank} ahead the run ended after step {steps} and validated after {evaluated}"
        )


class StopOnOneRank(Callback):
    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self.decide)

    def decide(self, run: Any) -> None:
        if run.progress.steps >= 3 and run.engine.strategy.rank == self.rank:
            run.stop("stopped by one rank")


def one_rank_can_stop_all(job: Job) -> None:
    """A callback that stops the run on one rank stops it on all, after the same step."""
    for hook in ("on_step_end", "on_log", "on_evaluation_end", "on_epoch_end"):
        alone, _ = _fit_and_compare(job, True, StopOnOneRank(0, hook))
        expected = alone.result.progress.steps
        for rank in sorted({0, job.world_size - 1}):
            found, _ = _fit_and_compare(job, False, StopOnOneRank(rank, hook))
            mine, why = found.result.progress.steps, found.result.stop_reason
            assert mine in (expected, expected + 1), (
                f"stopped in {hook} on rank {rank}, the run ended after step {mine}, alone after {expected}"
            )
            assert why == "stopped by one rank", (
                f"stopped in {hook} on rank {rank}, the run ended for {why!r}"
            )


DECISIONS = {
    each.__name__: each
    for each in (callbacks_decide_the_same, all_ranks_have_one_clock, one_rank_can_stop_all)
}
