"""The conformance suite of strategies: what each must give on any number of processes.

Every check trains small tasks under a strategy, in each process of a job, and compares with the same task in
one process on the whole batch. A strategy of your own is held to it by

    check_strategy(lambda world_size: MyStrategy(world_size=world_size), world_size=2)

What is promised is said in docs/how-to/strategies/ddp.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.checkpoint import CheckpointConfig, load_weights
from drivetrain.errors import CheckpointError
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.task import TaskModule
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategy_tasks import OPTIMIZERS, Counted, Duel, Norms, Sequences, Tokens
from drivetrain.trainer import FitResult, Trainer

MakeStrategy = Callable[[int], Strategy]
"""Given the number of processes, makes the strategy for this one; a name's row or an instance."""


@dataclass(frozen=True)
class Job:
    """What a check is given in each process.

    Attributes:
        make: Makes the strategy.
        rank: This process.
        world_size: How many there are.
        scratch: A directory that all of them share.
        precision: Of all runs.
        tolerance: The largest difference from one process, relative to the largest value.
    """

    make: MakeStrategy
    rank: int
    world_size: int
    scratch: Path
    precision: str = "32"
    tolerance: float = 1e-6

    def trainer(self, alone: bool, **options: Any) -> Trainer:
        """A quiet Trainer: of all processes, or of this one by itself."""
        devices = 1 if alone else self.world_size
        strategy: Any = self.make(self.world_size)
        if alone:
            strategy = SingleDevice(strategy.device.type)
        settings = {"progress_bar": False, "checkpoint": False, "max_epochs": 2, **options}
        return Trainer(strategy=strategy, devices=devices, precision=self.precision, **settings)

    def close(self, found: Any, expected: Any, what: str) -> None:
        """See that two trees of numbers are alike.

        Raises:
            AssertionError: They are not.
        """
        torch.testing.assert_close(
            found,
            expected,
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what} on rank {self.rank}: {text}",
        )


def whole_state(job: Job, task: TaskModule) -> dict[str, Tensor]:
    """A task's weights on the host, gathered from all processes where they are sharded."""
    state = {}
    for name, each in task.state_dict().items():
        full = each.full_tensor() if hasattr(each, "full_tensor") else each
        state[name] = full.detach().float().cpu()
    return state


def _sequences(batch_size: int) -> DataLoader[Any]:
    return DataLoader(Sequences(), batch_size=batch_size, shuffle=True)


def _fit(job: Job, alone: bool, task: TaskModule, data: Any, **options: Any) -> tuple[Any, FitResult, Norms]:
    norms = Norms()
    options = {"log_every": "1 step", **options}
    result = job.trainer(alone, callbacks=[norms], **options).fit(task, data)
    return whole_state(job, task), result, norms


def same_as_the_big_batch(job: Job) -> None:
    """Three optimizers; clipping, accumulation, ragged weights, a batch of padding alone, a short window."""
    for name in OPTIMIZERS:
        for accumulation in (1, 2):
            per_rank = 8 // (job.world_size * accumulation)
            expected, whole, norms = _fit(job, True, Tokens(name), _sequences(8), max_grad_norm=0.3)
            found, result, seen = _fit(
                job, False, Tokens(name), _sequences(per_rank),
                max_grad_norm=0.3, gradient_accumulation_steps=accumulation,
            )  # fmt: skip
            what = f"{name}, {accumulation} micro-batches of {per_rank}"
            job.close(found, expected, f"the weights ({what})")
            job.close(seen.norms, norms.norms, f"the gradient's norm ({what})")
            job.close(result.metrics, whole.metrics, f"the metrics ({what})")
            for each in ("updates", "samples", "tokens", "epoch"):
                mine, theirs = getattr(result.progress, each), getattr(whole.progress, each)
                assert mine == theirs, f"{each} ({what}): {mine}, alone {theirs}"


def frozen_and_tied(job: Job) -> None:
    """Frozen parameters stay as they are, and tied ones stay tied."""
    variants: tuple[dict[str, Any], ...] = ({"frozen": True}, {"tied": True})
    for options in variants:
        start = whole_state(job, Tokens(**options))
        expected, _, _ = _fit(job, True, Tokens(**options), _sequences(8))
        found, _, _ = _fit(job, False, Tokens(**options), _sequences(8 // job.world_size))
        job.close(found, expected, f"the weights ({options})")
        if "frozen" in options:
            assert torch.equal(found["blocks.0.0.weight"], start["blocks.0.0.weight"])
        else:
            assert torch.equal(found["head.weight"], found["embedding.weight"])


def generator_steps(job: Job) -> None:
    """Several optimizers in one step, also with accumulation."""
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(13, 4, generator=generator), torch.randn(13, 2, generator=generator))
    expected, whole, _ = _fit(job, True, Duel(), DataLoader(data, batch_size=8))
    for accumulation in (1, 2):
        per_rank = 8 // (job.world_size * accumulation)
        loader = DataLoader(data, batch_size=per_rank)
        found, result, _ = _fit(job, False, Duel(), loader, gradient_accumulation_steps=accumulation)
        job.close(found, expected, f"the weights ({accumulation} micro-batches)")
        job.close(result.metrics, whole.metrics, f"the metrics ({accumulation} micro-batches)")


def evaluation_counts_each_sample_once(job: Job) -> None:
    """Any number of samples and batch size, ranks without samples among them; predictions in order."""
    for count in (1, 2, 3, 5, 8, 11, 16, 17):
        for size in (1, 2, 3, 5):
            numbers = torch.arange(1.0, count + 1)[:, None]
            loader = DataLoader(TensorDataset(numbers), batch_size=size)
            trainer = job.trainer(False)
            found = trainer.validate(Counted(), loader)
            what = f"{count} samples in batches of {size}"
            job.close(found["validation/loss"], float(numbers.mean()), what)
            job.close(found["validation/square"], float(numbers.square().mean()), what)
            predicted = torch.cat([each.float() for each in trainer.predict(Counted(), loader)])
            job.close(predicted, numbers[:, 0], f"predictions of {what}")


def all_ranks_see_the_same(job: Job) -> None:
    """What is logged, and when, to the last bit, so that all callbacks decide alike."""
    _, result, norms = _fit(job, False, Tokens(), _sequences(2), max_grad_norm=1.0, log_every="3 steps")
    from torch import distributed

    seen: list[Any] = [None] * job.world_size
    distributed.all_gather_object(seen, (norms.seen, sorted(result.metrics.items())))
    assert all(each == seen[0] for each in seen), "the ranks were told different numbers"
    assert norms.seen, "nothing was logged"


def checkpoints_have_plain_names(job: Job) -> None:
    """The weights of a finished run load into a plain module, and equal what was trained."""
    directory = job.scratch / "plain"
    found, result, _ = _fit(job, False, Tokens(), _sequences(2), run_dir=directory, checkpoint=True)
    assert result.model_path is not None
    task = Tokens()
    task.load_state_dict(load_weights(result.model_path), strict=True)
    job.close(whole_state(job, task), found, "the exported weights")
    assert sorted(task.state_dict()) == sorted(found)


def resume_is_bitwise(job: Job) -> None:
    """Stopped in the middle of an epoch and resumed on as many processes, not a bit is different."""
    options: dict[str, Any] = {"max_grad_norm": 0.5, "log_every": "2 steps"}
    expected, whole, _ = _fit(job, False, Tokens(), _sequences(2), **options)
    _stopped(job, False, job.scratch / "bitwise", 3, 2, **options)
    found, result = _resumed(job, False, job.scratch / "bitwise", 2, **options)
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} differs after a resume"
    assert result.metrics == whole.metrics, f"{result.metrics}, undisturbed {whole.metrics}"


def _stopped(job: Job, alone: bool, directory: Path, updates: int, batch_size: int, **options: Any) -> None:
    policy = CheckpointConfig(every="1 step", best=0)
    _fit(
        job, alone, Tokens(), _sequences(batch_size),
        max_steps=updates, run_dir=directory, checkpoint=policy, **options,
    )  # fmt: skip


def _resumed(
    job: Job, alone: bool, directory: Path, batch_size: int, **options: Any
) -> tuple[dict[str, Tensor], FitResult]:
    task = Tokens()
    trainer = job.trainer(alone, run_dir=directory, checkpoint=CheckpointConfig(best=0), **options)
    result = trainer.fit(task, _sequences(batch_size), resume="auto")
    return whole_state(job, task), result


def resume_on_another_number_of_processes(job: Job) -> None:
    """From one to all of them and back, in the middle of an epoch: each sample once, the same next losses."""
    options: dict[str, Any] = {"max_grad_norm": 0.5, "log_every": "1 step"}
    expected, whole, _ = _fit(job, True, Tokens(), _sequences(8), **options)
    for name, first_alone in (("to", True), ("from", False)):
        directory = job.scratch / f"{name}-several"
        sizes = {True: 8, False: 8 // job.world_size}
        if not first_alone or job.rank == 0:
            _stopped(job, first_alone, directory, 2, sizes[first_alone], **options)
        torch.distributed.barrier()
        if first_alone or job.rank == 0:
            found, result = _resumed(job, not first_alone, directory, sizes[not first_alone], **options)
            job.close(found, expected, f"the weights after a resume {name} several processes")
            job.close(result.metrics, whole.metrics, f"the metrics after a resume {name} several processes")
            assert result.progress.samples == whole.progress.samples
        torch.distributed.barrier()


CHECKS: dict[str, Callable[[Job], None]] = {
    check.__name__: check
    for check in (
        same_as_the_big_batch,
        frozen_and_tied,
        generator_steps,
        evaluation_counts_each_sample_once,
        all_ranks_see_the_same,
        checkpoints_have_plain_names,
        resume_is_bitwise,
        resume_on_another_number_of_processes,
    )
}
"""By name; each is called in every process."""


def check_strategy(
    make: MakeStrategy,
    world_size: int = 2,
    *,
    checks: Sequence[str] = tuple(CHECKS),
    precision: str = "32",
    tolerance: float = 1e-6,
    timeout: float = 300.0,
) -> None:
    """Hold a strategy to the suite, in real processes.

    Args:
        make: Makes the strategy for a number of processes.
        world_size: How many processes.
        checks: Which of `CHECKS`.
        precision: Of all runs.
        tolerance: The largest difference from one process; 1e-6 is for float32.
        timeout: In seconds, for all.

    Raises:
        RuntimeError: A check failed; names the rank and what differed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run_distributed(
            _run_checks, make, scratch, tuple(checks), precision, tolerance,
            world_size=world_size, timeout=timeout,
        )  # fmt: skip


def _run_checks(
    make: MakeStrategy, scratch: str, checks: Sequence[str], precision: str, tolerance: float
) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in checks:
        if name not in CHECKS:
            raise CheckpointError(f"no check {name!r}; there are {', '.join(CHECKS)}")
        CHECKS[name](Job(make, rank, world_size, Path(scratch), precision, tolerance))
