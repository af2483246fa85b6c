"""Checks of resuming: bit for bit on as many processes, and each strategy's checkpoints by every other."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drivetrain.callbacks import Callback
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.errors import ConfigError
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategy_job import Job, Leave, MakeStrategy, Outcome
from drivetrain.testing.strategy_tasks import Sequences, Tokens

POLICY = CheckpointConfig(every=None, best=0)
"""A run that is left is saved where it stands, and no sooner."""

STOP = 4
"""The update after which the runs of `check_resume` are left: of three an epoch, so in the middle of one."""


def _task() -> Tokens:
    return Tokens(schedule="cosine", dropout=0.2, measured=True)


def resume_is_bitwise(job: Job) -> None:
    """Stopped in an epoch or between two, and resumed on as many processes, not a bit is different.

    Compared are the losses, norms, rates and metrics of every update, and the weights and the optimizer's
    state at the end; with dropout, accumulation, a schedule and a declared metric.
    """
    options: dict[str, Any] = {"max_grad_norm": 0.5, "log_every": "2 steps", "gradient_accumulation_steps": 2}
    data = job.sequences(False, 2)
    whole = job.fit(False, _task(), data, max_epochs=3, **options)
    for stop in (1, 3, 5):
        directory = job.scratch / f"bitwise-{stop}"
        options |= {"run_dir": directory, "checkpoint": POLICY, "max_epochs": 3}
        before = job.fit(False, _task(), data, callbacks=[Leave(stop)], **options)
        after = job.fit(False, _task(), data, resume="auto", **options)
        _same_bits(job, before, after, whole, f"a resume after update {stop}")


def _same_bits(job: Job, before: Outcome, after: Outcome, whole: Outcome, what: str) -> None:
    for name in ("norms", "rates"):
        found = getattr(before.record, name) + getattr(after.record, name)
        expected = getattr(whole.record, name)
        assert found == expected, f"the {name} differ in {what} on rank {job.rank}: {found}, not {expected}"
    # A run that ends logs what is left, which the uninterrupted one logs later, with what follows.
    stop = before.result.progress.updates
    expected = [each for each in whole.record.logged if each[0] > stop]
    assert after.record.logged == expected, (
        f"what is logged differs in {what} on rank {job.rank}: {after.record.logged}, not {expected}"
    )
    assert after.result.metrics == whole.result.metrics, f"the metrics differ in {what} on rank {job.rank}"
    for kind, found, expected in (
        ("weights", after.weights, whole.weights),
        ("optimizer's state", after.record.optimizer, whole.record.optimizer),
    ):
        assert sorted(found) == sorted(expected), f"the {kind} has other names in {what}: {sorted(found)}"
        for name, value in expected.items():
            assert torch.equal(found[name], value), (
                f"{name} of the {kind} differs in {what} on rank {job.rank}"
            )


def resume_on_another_number_of_processes(job: Job) -> None:
    """From one to all of them and back, in the middle of an epoch: each sample once, the same next losses."""
    options: dict[str, Any] = {"max_grad_norm": 0.5}
    whole = job.fit(True, Tokens(), job.sequences(True), **options)
    for name, first_alone in (("to", True), ("from", False)):
        directory = job.scratch / f"{name}-several"
        if not first_alone or job.rank == 0:
            data = job.sequences(first_alone)
            stopped = {"callbacks": [Leave(2)], "run_dir": directory, "checkpoint": POLICY, **options}
            job.fit(first_alone, Tokens(), data, **stopped)
        torch.distributed.barrier()
        if first_alone or job.rank == 0:
            data = job.sequences(not first_alone)
            resumed = {"run_dir": directory, "checkpoint": POLICY, **options}
            found = job.fit(not first_alone, Tokens(), data, resume="auto", **resumed)
            what = f"after a resume {name} several processes"
            job.close(found.weights, whole.weights, f"the weights {what}")
            job.close(found.result.metrics, whole.result.metrics, f"the metrics {what}")
            mine, theirs = found.result.progress.samples, whole.result.progress.samples
            assert mine == theirs, f"{mine} samples {what} on rank {job.rank}, alone {theirs}"
        torch.distributed.barrier()


class Shown(Callback):
    """Which samples all processes together were given in which epoch, and the mean losses.

    Attributes:
        samples: The epoch and the number of each, sorted at the run's end.
        losses: The mean over all processes, by update.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []
        self.losses: list[float] = []

    def on_step_start(self, run: Any) -> None:
        """Note the window's samples; what only stands in for another process's counts for nothing."""
        for each in run.window.micro_batches:
            if not each.stand_in:
                self.samples += [(run.progress.epoch, index) for index in each.batch["index"].tolist()]

    def on_step_end(self, run: Any) -> None:
        """Note the update's loss."""
        mine = sum(float(weight) for _, _, weight in run.step.rows)
        total, weight = run.engine.data_ranks.total([run.step.loss * mine if mine else 0.0, mine])
        self.losses.append(total / weight)

    def on_fit_end(self, run: Any) -> None:
        """Put together what all were given."""
        each = run.engine.data_ranks.all_gather(self.samples)
        self.samples = sorted(tuple(sample) for samples in each for sample in samples)


class _Plan(NamedTuple):
    """What all processes of all jobs of `check_resume` know."""

    scratch: Path
    precision: str
    tolerance: float
    batch: int


def check_resume(
    makers: Mapping[str, MakeStrategy],
    world_sizes: Sequence[int] = (1, 2, 4),
    *,
    precision: str = "32",
    tolerance: float = 1e-6,
    timeout: float = 300.0,
) -> int:
    """Save under each strategy in the middle of an epoch, and go on from there under each, in real processes.

    Every pair of a strategy and a number of processes goes on from every other's checkpoint. In the epoch
    that was left each sample is seen once; losses, norms, rates, weights and the optimizer's state are those
    of a run in one process that was never left.

    Args:
        makers: By name, what makes a strategy for a number of processes. One that gives a strategy of another
            number of processes than it was asked for takes no part with that number.
        world_sizes: The numbers of processes.
        precision: Of all runs.
        tolerance: The largest difference from one process; 1e-6 is for float32.
        timeout: In seconds, for all runs of one strategy on one number of processes.

    Returns:
        How many pairs were held to it.

    Raises:
        ConfigError: A strategy that runs on none of the numbers.
        RuntimeError: Something differed; names who saved and who resumed.
    """
    cases = [
        (name, size) for name, make in makers.items() for size in world_sizes if make(size).world_size == size
    ]
    without = sorted(set(makers) - {name for name, _ in cases})
    if without:
        raise ConfigError(f"{', '.join(without)} runs on none of {list(world_sizes)} processes; give others")
    with tempfile.TemporaryDirectory() as scratch:
        # The same updates on every number of processes.
        together = math.lcm(*(makers[name](size).data_size for name, size in cases))
        plan = _Plan(Path(scratch), precision, tolerance, together * max(1, 8 // together))
        for act in (_save, _resume_all):
            for name, size in cases:
                run_distributed(act, makers[name], name, plan, cases, world_size=size, timeout=timeout)
    return len(cases) ** 2


def _save(make: MakeStrategy, name: str, plan: _Plan, cases: Sequence[tuple[str, int]]) -> None:
    job = _job(make, plan)
    directory = plan.scratch / f"{name}-{job.world_size}"
    shown = Shown()
    _run(job, False, shown, Leave(STOP), checkpoint=POLICY, run_dir=directory)
    if job.rank == 0:
        (directory / "shown.json").write_text(json.dumps(shown.samples), encoding="utf-8")


def _resume_all(make: MakeStrategy, name: str, plan: _Plan, cases: Sequence[tuple[str, int]]) -> None:
    job = _job(make, plan)
    shown = Shown()
    whole = _run(job, True, shown)
    for saver, size in cases:
        what = f"saved under {saver} on {size}, resumed under {name} on {job.world_size}"
        saved = plan.scratch / f"{saver}-{size}"
        copy = plan.scratch / f"{saver}-{size}-{name}-{job.world_size}"
        if job.rank == 0:
            shutil.copytree(saved, copy)
        torch.distributed.barrier()
        after = Shown()
        found = _run(job, False, after, resume="auto", checkpoint=POLICY, run_dir=copy)
        before = [tuple(each) for each in json.loads((saved / "shown.json").read_text(encoding="utf-8"))]
        _check_samples([*before, *after.samples], what)
        job.close(after.losses, shown.losses[STOP:], f"the losses ({what})")
        job.close(found.record.norms, whole.record.norms[STOP:], f"the gradient's norms ({what})")
        job.close(found.record.rates, whole.record.rates[STOP:], f"the rates ({what})")
        job.close(found.weights, whole.weights, f"the weights ({what})")
        job.close(found.record.optimizer, whole.record.optimizer, f"the optimizer's state ({what})")
        job.close(found.result.metrics, whole.result.metrics, f"the metrics ({what})")


def _job(make: MakeStrategy, plan: _Plan) -> Job:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Job(make, rank, size, plan.scratch, plan.precision, plan.tolerance, plan.batch)


def _run(job: Job, alone: bool, *callbacks: Callback, **options: Any) -> Outcome:
    task = Tokens(schedule="cosine", measured=True)
    # A log interval that the stop falls into: what was not logged yet is part of the checkpoint.
    options = {"max_grad_norm": 0.5, "log_every": "3 steps", **options}
    return job.fit(alone, task, job.sequences(alone), callbacks=callbacks, **options)


def _check_samples(seen: Sequence[tuple[int, int]], what: str) -> None:
    """See that in each epoch each sample was seen once.

    Raises:
        AssertionError: One was not, or more than once.
    """
    expected = {(epoch, index) for epoch in range(2) for index in range(len(Sequences()))}
    lost, twice = sorted(expected - set(seen)), sorted({each for each in seen if seen.count(each) > 1})
    right = sorted(seen) == sorted(expected)
    assert right, f"{what}: of (epoch, sample) {lost} were never seen, {twice} more than once"
