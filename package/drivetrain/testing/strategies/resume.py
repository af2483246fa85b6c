"""Checks of resuming: bitwise on the same number of processes, and across strategies and world sizes."""

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
from drivetrain.core.errors import ConfigError
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.job import Job, MakeStrategy, Outcome, StopAfter
from drivetrain.testing.strategies.tasks import Sequences, Tokens

POLICY = CheckpointConfig(every=None, best=0)
"""Saves only at the end of a run, also of one that is stopped early."""

STOP = 4
"""The step after which `check_resume` stops its runs. An epoch has three, so it is within the second."""


def _task() -> Tokens:
    return Tokens(schedule="cosine", dropout=0.2, with_metric=True)


def resume_is_bitwise(job: Job) -> None:
    """A run that is stopped and resumed on the same number of processes equals an uninterrupted one bitwise.

    It is stopped within an epoch and between two. Losses, norms, rates and metrics of every step are
    compared, and the weights and optimizer states at the end. The task has dropout, accumulation, a schedule
    and a declared metric.
    """
    options: dict[str, Any] = {"max_grad_norm": 0.5, "log_every": "2 steps", "gradient_accumulation_steps": 2}
    data = job.sequences(False, 2)
    whole = job.fit(False, _task(), data, max_epochs=3, **options)
    for stop in (1, 3, 5):
        directory = job.scratch / f"bitwise-{stop}"
        options |= {"run_dir": directory, "checkpoint": POLICY, "max_epochs": 3}
        before = job.fit(False, _task(), data, callbacks=[StopAfter(stop)], **options)
        after = job.fit(False, _task(), data, resume="auto", **options)
        _same_bits(job, before, after, whole, f"a resume after step {stop}")


def _same_bits(job: Job, before: Outcome, after: Outcome, whole: Outcome, what: str) -> None:
    for name in ("norms", "rates"):
        found = getattr(before.record, name) + getattr(after.record, name)
        expected = getattr(whole.record, name)
        assert found == expected, f"the {name} differ in {what} on rank {job.rank}: {found}, not {expected}"
    # The stopped run logs its last values at the stop; the uninterrupted one logs them with later values.
    stop = before.result.progress.steps
    expected = [each for each in whole.record.logged if each[0] > stop]
    assert after.record.logged == expected, (
        f"the logged values differ in {what} on rank {job.rank}: {after.record.logged}, not {expected}"
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
    """A run resumes within an epoch on more or fewer processes and trains as without the stop."""
    options: dict[str, Any] = {"max_grad_norm": 0.5}
    whole = job.fit(True, Tokens(), job.sequences(True), **options)
    for name, first_alone in (("to", True), ("from", False)):
        directory = job.scratch / f"{name}-several"
        if not first_alone or job.rank == 0:
            data = job.sequences(first_alone)
            stopped = {"callbacks": [StopAfter(2)], "run_dir": directory, "checkpoint": POLICY, **options}
            job.fit(first_alone, Tokens(), data, **stopped)
        torch.distributed.barrier()
        if first_alone or job.rank == 0:
            data = job.sequences(not first_alone)
            resumed = {"run_dir": directory, "checkpoint": POLICY, **options}
            found = job.fit(not first_alone, Tokens(), data, resume="auto", **resumed)
            what = f"after a resume {name} several processes"
            job.assert_equals_one_process(found.weights, whole.weights, f"the weights {what}")
            job.assert_equals_one_process(found.result.metrics, whole.result.metrics, f"the metrics {what}")
            mine, theirs = found.result.progress.samples, whole.result.progress.samples
            assert mine == theirs, f"{mine} samples {what} on rank {job.rank}, alone {theirs}"
        torch.distributed.barrier()


class SampleRecord(Callback):
    """Notes the samples and losses of a run on all processes.

    Attributes:
        samples: The (epoch, index) of each sample, sorted at the end of the run.
        losses: The mean loss over all processes, by step.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []
        self.losses: list[float] = []

    def on_step_start(self, run: Any) -> None:
        """Note the window's samples, leaving out placeholder batches."""
        for each in run.window.micro_batches:
            if not each.is_placeholder:
                self.samples += [(run.progress.epoch, index) for index in each.batch["index"].tolist()]

    def on_step_end(self, run: Any) -> None:
        mine = sum(float(weight) for _, _, weight in run.result.step_values)
        total, weight = run.engine.data_ranks.total([run.result.loss * mine if mine else 0.0, mine])
        self.losses.append(total / weight)

    def on_fit_end(self, run: Any) -> None:
        each = run.engine.data_ranks.all_gather(self.samples)
        self.samples = sorted(tuple(sample) for samples in each for sample in samples)


class _ResumeCase(NamedTuple):
    """The settings that all processes of `check_resume` share."""

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
    """Save a run under each strategy within an epoch, and resume it under each, in real processes.

    Every pair of a strategy and a world size resumes from every other's checkpoint. Each sample of the epoch
    must be seen once. Losses, norms, rates, weights and optimizer states must equal those of an uninterrupted
    run in one process.

    Args:
        makers: By name, a function that makes a strategy for a given number of processes. A pair is left out
            if the strategy has another number of processes than was asked for.
        world_sizes: The numbers of processes.
        precision: The precision of all runs.
        tolerance: The largest difference from one process; 1e-6 is for float32.
        timeout: Time limit in seconds for all runs of one strategy on one number of processes.

    Returns:
        The number of combinations that were checked.

    Raises:
        ConfigError: A strategy runs on none of the world sizes.
        RuntimeError: A value differed; the message names the strategy that saved and the one that resumed.
    """
    cases = [
        (name, size) for name, make in makers.items() for size in world_sizes if make(size).world_size == size
    ]
    without = sorted(set(makers) - {name for name, _ in cases})
    if without:
        raise ConfigError(f"{', '.join(without)} runs on none of {list(world_sizes)} processes; give others")
    with tempfile.TemporaryDirectory() as scratch:
        # A batch size that every number of processes can share equally.
        together = math.lcm(*(makers[name](size).data_size for name, size in cases))
        plan = _ResumeCase(Path(scratch), precision, tolerance, together * max(1, 8 // together))
        for act in (_save, _resume_all):
            for name, size in cases:
                run_distributed(act, makers[name], name, plan, cases, world_size=size, timeout=timeout)
    return len(cases) ** 2


def _save(make: MakeStrategy, name: str, plan: _ResumeCase, cases: Sequence[tuple[str, int]]) -> None:
    job = _job(make, plan)
    directory = plan.scratch / f"{name}-{job.world_size}"
    record = SampleRecord()
    _run(job, False, record, StopAfter(STOP), checkpoint=POLICY, run_dir=directory)
    if job.rank == 0:
        (directory / "record.json").write_text(json.dumps(record.samples), encoding="utf-8")


def _resume_all(make: MakeStrategy, name: str, plan: _ResumeCase, cases: Sequence[tuple[str, int]]) -> None:
    job = _job(make, plan)
    record = SampleRecord()
    whole = _run(job, True, record)
    for saver, size in cases:
        what = f"saved under {saver} on {size}, resumed under {name} on {job.world_size}"
        saved = plan.scratch / f"{saver}-{size}"
        copy = plan.scratch / f"{saver}-{size}-{name}-{job.world_size}"
        if job.rank == 0:
            shutil.copytree(saved, copy)
        torch.distributed.barrier()
        after = SampleRecord()
        found = _run(job, False, after, resume="auto", checkpoint=POLICY, run_dir=copy)
        before = [tuple(each) for each in json.loads((saved / "record.json").read_text(encoding="utf-8"))]
        _check_samples([*before, *after.samples], what)
        job.assert_equals_one_process(after.losses, record.losses[STOP:], f"the losses ({what})")
        job.assert_equals_one_process(
            found.record.norms, whole.record.norms[STOP:], f"the gradient's norms ({what})"
        )
        job.assert_close(found.record.rates, whole.record.rates[STOP:], f"the rates ({what})")
        job.assert_equals_one_process(found.weights, whole.weights, f"the weights ({what})")
        job.assert_equals_one_process(
            found.record.optimizer, whole.record.optimizer, f"the optimizer's state ({what})"
        )
        job.assert_equals_one_process(found.result.metrics, whole.result.metrics, f"the metrics ({what})")


def _job(make: MakeStrategy, plan: _ResumeCase) -> Job:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Job(make, rank, size, plan.scratch, plan.precision, plan.tolerance, plan.batch)


def _run(job: Job, alone: bool, *callbacks: Callback, **options: Any) -> Outcome:
    task = Tokens(schedule="cosine", with_metric=True)
    # The stop falls between two log points, so the checkpoint holds unlogged values.
    options = {"max_grad_norm": 0.5, "log_every": "3 steps", **options}
    return job.fit(alone, task, job.sequences(alone), callbacks=callbacks, **options)


def _check_samples(seen: Sequence[tuple[int, int]], what: str) -> None:
    """Check that each sample was seen once in each epoch."""
    expected = {(epoch, index) for epoch in range(2) for index in range(len(Sequences()))}
    lost, twice = sorted(expected - set(seen)), sorted({each for each in seen if seen.count(each) > 1})
    right = sorted(seen) == sorted(expected)
    assert right, f"{what}: of (epoch, sample) {lost} were never seen, {twice} more than once"
