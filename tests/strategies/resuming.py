"""Strategies resume from one another's checkpoints, on any number of processes."""

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
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.job import Job, MakeStrategy, Outcome, StopAfter
from drivetrain.testing.strategies.resume import POLICY
from drivetrain.testing.strategies.tasks import Sequences, Tokens

STOP = 4  # the step after which runs stop; an epoch has three, so it is within the second


class SampleRecord(Callback):
    """Notes the samples and losses of a run on all processes."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []  # the epoch and index of each, sorted at the end
        self.losses: list[float] = []

    def on_step_start(self, run: Any) -> None:
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


class _ResumeCase(NamedTuple):  # the settings that all processes of `check_resume` share
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
    """Resume a run of each strategy and world size by each, exactly; return the number of pairs."""
    cases = [
        (name, size) for name, make in makers.items() for size in world_sizes if make(size).world_size == size
    ]
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
    expected = {(epoch, index) for epoch in range(2) for index in range(len(Sequences()))}
    lost, twice = sorted(expected - set(seen)), sorted({each for each in seen if seen.count(each) > 1})
    right = sorted(seen) == sorted(expected)
    assert right, f"{what}: of (epoch, sample) {lost} were never seen, {twice} more than once"
