"""Checks of resuming: bitwise on the same number of processes, and on more or fewer."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.testing.strategies.job import Job, Outcome, StopAfter
from drivetrain.testing.strategies.tasks import Tokens

POLICY = CheckpointConfig(every=None, best=0)
"""Saves only at the end of a run, also of one that is stopped early."""


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
