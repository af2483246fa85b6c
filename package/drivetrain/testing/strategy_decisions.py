"""Checks that all processes decide alike: by what they are told, by the clock, and when one decides alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from drivetrain.callbacks import Callback, EarlyStopping
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.index import read_index
from drivetrain.checkpoint.locate import CHECKPOINTS
from drivetrain.testing.strategy_job import Job, Outcome, same_everywhere
from drivetrain.testing.strategy_tasks import Sequences, Tokens


class Witness(Callback):
    """Compares what the processes know before any of them can decide by it.

    Processes that decide differently would wait for one another for ever; this tells it at once.

    Attributes:
        evaluated: The value of `validation/loss` at each validation, and after which update.
    """

    def __init__(self) -> None:
        self.evaluated: list[tuple[int, float]] = []

    def on_step_end(self, run: Any) -> None:
        """Compare the counts, and the rates."""
        counts = {name: value for name, value in run.progress.to_json().items() if name != "seconds"}
        self._compare((counts, run.learning_rates()), "on_step_end")

    def on_log(self, run: Any) -> None:
        """Compare what is logged."""
        self._compare(sorted(run.logged.items()), "on_log")

    def on_evaluation_end(self, run: Any) -> None:
        """Compare the values."""
        values = run.evaluation.values
        self._compare(sorted(values.items()), "on_evaluation_end")
        self.evaluated.append((run.progress.updates, values["validation/loss"]))

    def on_save(self, run: Any) -> None:
        """Compare whether to stop, and the time if anything is due by it."""
        seconds = run.progress.seconds if run.by_time else None
        self._compare((run.stop_reason, seconds), f"on_save after update {run.progress.updates}")

    def _compare(self, value: Any, hook: str) -> None:
        if torch.distributed.is_initialized():
            same_everywhere(value, f"what decides in {hook}")


def _decided(job: Job, alone: bool, *callbacks: Any, **options: Any) -> tuple[Outcome, Witness]:
    """A fit with a validation after every update, unless `options` say otherwise."""
    witness = Witness()
    shown = (*(() if alone else (witness,)), *callbacks)
    task = Tokens(schedule="reduce_on_plateau")
    data = job.sequences(alone)
    found = job.fit(
        alone, task, data, validation=data, callbacks=shown, **{"validate_every": "1 step", **options}
    )
    if not alone:
        result = found.result
        same_everywhere((result.stop_reason, result.progress.updates), "why and when the run ended")
    return found, witness


class Below(Callback):
    """Stops when what is logged is at most a bound.

    Args:
        bound: Of `train/loss`.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def on_log(self, run: Any) -> None:
        """Look at the loss."""
        if run.logged.get("train/loss", self.bound + 1) <= self.bound:
            run.stop("low enough")


def callbacks_decide_alike(job: Job) -> None:
    """Early stopping, the best checkpoints, a schedule that watches, and a callback that reads the log."""
    # At every other validation there is something that processes have logged of their own.
    stops = {"max_epochs": 4, "log_every": "2 steps"}
    directory = job.scratch / "decisions"
    # A loss that falls never rises above the first one: the rates are lowered, then the run is ended.
    policy = CheckpointConfig(every=None, best=2, keep_last=1, mode="max")
    alone, _ = _decided(job, True, EarlyStopping(mode="max", patience=6), **stops)
    found, witness = _decided(
        job, False, EarlyStopping(mode="max", patience=6), checkpoint=policy, run_dir=directory, **stops
    )
    _same_decisions(job, found, alone, "early stopping")
    assert len({rates["lr"] for rates in found.record.rates}) > 1, "the schedule never lowered the rate"
    entries = read_index(str(directory / CHECKPOINTS)) or []
    kept = sorted(each.update for each in entries if each.keeper)
    best = sorted(update for update, _ in sorted(witness.evaluated, key=lambda pair: -pair[1])[:2])
    assert kept == best, f"of {witness.evaluated} the checkpoints {kept} were kept"
    losses = [values["train/loss"] for _, values in alone.record.logged if "train/loss" in values]
    bound = min(losses[:3]) + 1e-4
    alone, _ = _decided(job, True, Below(bound), **stops)
    found, _ = _decided(job, False, Below(bound), **stops)
    _same_decisions(job, found, alone, "a callback that reads the log")


def _same_decisions(job: Job, found: Outcome, alone: Outcome, what: str) -> None:
    updates = alone.result.progress.updates
    mine = found.result.progress.updates
    assert mine == updates, f"{what} on rank {job.rank} ended the run after update {mine}, alone {updates}"
    job.close(found.record.rates, alone.record.rates, f"the rates ({what})")


class Ahead(Callback):
    """On one process two hours pass during the third update.

    Args:
        rank: On which one.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, run: Any) -> None:
        """Move the time at which the run began."""
        if run.progress.updates == 3 and run.engine.strategy.rank == self.rank:
            run.origin -= 7200


def all_ranks_have_one_clock(job: Job) -> None:
    """What is due by time is due on all ranks after the same update, however their clocks differ."""
    for rank in sorted({0, job.world_size - 1}):
        options = {"max_time": "1 hour", "validate_every": "1 hour", "log_every": "1 hour"}
        found, witness = _decided(job, False, Ahead(rank), **options)
        updates, evaluated = found.result.progress.updates, [update for update, _ in witness.evaluated]
        whole = 2 * math.ceil(len(Sequences()) / job.update)
        expected: tuple[int, list[int]] = (3, [3]) if rank == 0 else (whole, [whole])
        assert (updates, evaluated) == expected, (
            f"with rank {rank} ahead the run ended after update {updates} and validated after {evaluated}"
        )


class OneStops(Callback):
    """Ends the run on one process, after the third update.

    Args:
        rank: On which one.
        hook: Where.
    """

    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self.decide)

    def decide(self, run: Any) -> None:
        """Ask for the end."""
        if run.progress.updates >= 3 and run.engine.strategy.rank == self.rank:
            run.stop("one wanted it")


class WouldStop(Callback):
    """Notes when `OneStops` would end the run, for several hooks in one fit.

    Args:
        hooks: Where.

    Attributes:
        updates: By hook, the update after which it would first ask for the end.
    """

    def __init__(self, *hooks: str) -> None:
        self.updates: dict[str, int] = {}
        for hook in hooks:
            setattr(self, hook, partial(self._note, hook))

    def _note(self, hook: str, run: Any) -> None:
        if run.progress.updates >= 3:
            self.updates.setdefault(hook, run.progress.updates)


def one_rank_can_stop_all(job: Job) -> None:
    """A callback that ends the run on one rank ends it on all, after the same update.

    That is the one after which it would end alone, or the next where another rank had ended that one already.
    """
    hooks = ("on_step_end", "on_log", "on_evaluation_end", "on_epoch_end")
    would = WouldStop(*hooks)
    _decided(job, True, would)
    for hook in hooks:
        expected = would.updates[hook]
        for rank in sorted({0, job.world_size - 1}):
            found, _ = _decided(job, False, OneStops(rank, hook))
            mine, why = found.result.progress.updates, found.result.stop_reason
            assert mine in (expected, expected + 1), (
                f"stopped in {hook} on rank {rank}, the run ended after update {mine}, alone after {expected}"
            )
            assert why == "one wanted it", f"stopped in {hook} on rank {rank}, the run ended for {why!r}"
