"""The runs that a check of a strategy makes in each process, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.callbacks import Callback
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.own_loop_checkpoint import optimizer_state
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.strategies.registry import DEVICES
from drivetrain.task.task import TaskModule
from drivetrain.testing.strategies.tasks import Sequences
from drivetrain.trainer.result import FitResult
from drivetrain.trainer.trainer import Trainer

MakeStrategy = Callable[[int], Strategy]
"""Makes a new strategy for this process, given the number of processes."""


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor on the host in float64, gathered from all ranks if it is sharded."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().double().cpu()


def whole_state(task: TaskModule) -> dict[str, Tensor]:
    """Return a task's weights on the host, gathered from all ranks."""
    return {name: whole(each) for name, each in task.state_dict().items()}


class Record(Callback):
    """Records a run.

    Attributes:
        norms: The gradient norm of each step.
        rates: The learning rates after each step.
        logged: The step and the values of each log point.
        optimizer: The optimizer states at the end, by `parameter/slot`.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.rates: list[dict[str, float]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.optimizer: dict[str, Tensor] = {}

    def on_step_end(self, run: Any) -> None:
        """Note the norm and the rates, and log a value that differs between ranks."""
        run.log("rank", run.engine.strategy.rank)
        if run.result.grad_norm is not None:
            self.norms.append(float(run.result.grad_norm))
        self.rates.append(run.learning_rates())

    def on_log(self, run: Any) -> None:
        self.logged.append((run.progress.steps, dict(run.logged)))

    def on_fit_end(self, run: Any) -> None:
        """Note the optimizer states, gathered from all ranks."""
        run.task.state_dict()  # makes FSDP shard the weights that an evaluation gathered
        with run.engine.checkpoint_layout() as optimizers:
            tensors, _ = optimizer_state(run.task, optimizers)
        self.optimizer = {name: whole(each) for name, each in tensors.items()}


class StopAfter(Callback):
    """Stops a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.progress.steps == self.step:
            run.stop("stopped by the check")


class Outcome(NamedTuple):
    """The results of a finished run."""

    weights: Mapping[str, Tensor]
    result: FitResult
    record: Record


@dataclass(frozen=True)
class Job:
    """The argument of a check in each process: it makes the runs and compares their results.

    Attributes:
        make: Makes the strategy.
        rank: The rank of this process.
        world_size: The number of processes.
        scratch: A directory that all processes share.
        precision: The precision of all runs.
        tolerance: The absolute and relative tolerance of comparisons.
        batch: Samples in a step, over all processes. The default is about eight.
    """

    make: MakeStrategy
    rank: int
    world_size: int
    scratch: Path
    precision: str = "32"
    tolerance: float = 1e-6
    batch: int | None = None

    @property
    def shards(self) -> int:
        """The number of shards of the data: below `world_size` if several ranks read the same shard."""
        return self.make(self.world_size).data_size

    @property
    def step(self) -> int:
        """Samples in a step, over all processes: at least two for each shard."""
        least = 2 * self.shards
        return self.batch or least * max(1, 8 // least)

    def trainer(self, alone: bool, **options: Any) -> Trainer:
        """Return a Trainer for all processes or, if `alone`, for this one only."""
        devices = 1 if alone else self.world_size
        strategy: Any = self.make(self.world_size)
        if alone:
            kind = strategy.device.type
            strategy = SingleDevice(kind if kind in DEVICES else "cpu")
        settings = {"progress_bar": False, "checkpoint": False, "max_epochs": 2, **options}
        settings.setdefault("loggers", ())
        return Trainer(strategy=strategy, devices=devices, precision=self.precision, **settings)

    def fit(
        self,
        alone: bool,
        task: TaskModule,
        data: Any,
        *,
        validation: Any = None,
        resume: str | None = None,
        **options: Any,
    ) -> Outcome:
        """Train a task, and log every step unless `options` give another interval."""
        record = Record()
        options = {"log_every": "1 step", **options}
        trainer = self.trainer(alone, **{**options, "callbacks": [record, *options.get("callbacks", ())]})
        result = trainer.fit(task, data, validation, resume=resume)
        return Outcome(whole_state(task), result, record)

    def sequences(self, alone: bool, accumulation: int = 1, **options: Any) -> DataLoader[Any]:
        """Return shuffled sequences, in batches that give the same steps alone and over all processes."""
        parts = 1 if alone else self.shards * accumulation
        return DataLoader(Sequences(**options), batch_size=self.step // parts, shuffle=True)

    @cached_property
    def inexact(self) -> str:
        """The reason why the strategy's results differ from those of one process; empty if they do not."""
        return self.make(self.world_size).refuses("exactness")

    def assert_equals_one_process(self, found: Any, expected: Any, what: str) -> None:
        """Compare with one process on the whole batch, unless the strategy declares itself inexact.

        Raises:
            AssertionError: They differ.
        """
        if not self.inexact:
            self.assert_close(found, expected, what)

    def assert_close(self, found: Any, expected: Any, what: str) -> None:
        """Compare two trees of numbers within the tolerance.

        Raises:
            AssertionError: They differ.
        """
        torch.testing.assert_close(
            found,
            expected,
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what} on rank {self.rank}: {text}",
        )


def assert_same_on_all_ranks(value: Any, what: str) -> None:
    """Check that all ranks have the same value, to the last bit. All ranks must call it."""
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    seen = ranks.all_gather(repr(value))  # compared as text, because NaN differs from itself
    for rank, each in enumerate(seen):
        assert each == seen[0], f"{what}: rank 0 has {seen[0]}, rank {rank} has {each}"
