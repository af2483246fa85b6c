"""What a check of a strategy is given in each process, and what it notes of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.callbacks import Callback
from drivetrain.engine_state import optimizer_state
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.strategies.table import DEVICES
from drivetrain.task import TaskModule
from drivetrain.testing.strategy_tasks import Sequences
from drivetrain.trainer import FitResult, Trainer

MakeStrategy = Callable[[int], Strategy]
"""Given the number of processes, makes the strategy of this one: a new instance each time."""


def whole(tensor: Tensor) -> Tensor:
    """A tensor on the host, gathered from all processes where it is sharded; no bit of it is lost."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().double().cpu()


def whole_state(task: TaskModule) -> dict[str, Tensor]:
    """A task's weights on the host."""
    return {name: whole(each) for name, each in task.state_dict().items()}


class Record(Callback):
    """What a run showed to its callbacks.

    Attributes:
        norms: The gradient's norm at each update.
        rates: The learning rates after each update.
        logged: What was logged, and after which update.
        optimizer: The optimizers' states at the end, by `parameter/slot`.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.rates: list[dict[str, float]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.optimizer: dict[str, Tensor] = {}

    def on_step_end(self, run: Any) -> None:
        """Note the norm and the rates; of what each process logs of its own, all are to see the same."""
        run.log("own", run.engine.strategy.rank)
        if run.step.grad_norm is not None:
            self.norms.append(float(run.step.grad_norm))
        self.rates.append(run.learning_rates())

    def on_log(self, run: Any) -> None:
        """Note what is logged."""
        self.logged.append((run.progress.updates, dict(run.logged)))

    def on_fit_end(self, run: Any) -> None:
        """Note the optimizers' states, gathered from all processes where they are sharded."""
        run.task.state_dict()  # FSDP puts what an evaluation has gathered back into its shards
        with run.engine.exchanged() as optimizers:
            tensors, _ = optimizer_state(run.task, optimizers)
        self.optimizer = {name: whole(each) for name, each in tensors.items()}


class Leave(Callback):
    """Ends a run before its time, so that it is saved where it stands.

    Args:
        update: After which update.
    """

    def __init__(self, update: int) -> None:
        self.update = update

    def on_step_end(self, run: Any) -> None:
        """Ask for the end."""
        if run.progress.updates == self.update:
            run.stop("left")


class Outcome(NamedTuple):
    """A run that has ended.

    Attributes:
        weights: The task's, whole and on the host.
        result: What `fit` gave.
        record: What the callbacks saw.
    """

    weights: Mapping[str, Tensor]
    result: FitResult
    record: Record


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
        batch: Samples of an update, over all processes; None for about eight.
    """

    make: MakeStrategy
    rank: int
    world_size: int
    scratch: Path
    precision: str = "32"
    tolerance: float = 1e-6
    batch: int | None = None

    @property
    def shares(self) -> int:
        """Into how many shares the data is divided: fewer than there are processes where several get one."""
        return self.make(self.world_size).data_size

    @property
    def update(self) -> int:
        """Samples of an update, over all processes; each can have two micro-batches of them."""
        least = 2 * self.shares
        return self.batch or least * max(1, 8 // least)

    def trainer(self, alone: bool, **options: Any) -> Trainer:
        """A quiet Trainer: of all processes, or of this one by itself."""
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
        """Train, by default logging at every update."""
        record = Record()
        options = {"log_every": "1 step", **options}
        trainer = self.trainer(alone, **{**options, "callbacks": [record, *options.get("callbacks", ())]})
        result = trainer.fit(task, data, validation, resume=resume)
        return Outcome(whole_state(task), result, record)

    def sequences(self, alone: bool, accumulation: int = 1, **options: Any) -> DataLoader[Any]:
        """Shuffled sequences, in batches that make the same updates alone and over all processes."""
        parts = 1 if alone else self.shares * accumulation
        return DataLoader(Sequences(**options), batch_size=self.update // parts, shuffle=True)

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


def same_everywhere(value: Any, what: str) -> None:
    """See that all processes have the same, to the last bit; to be called by all of them.

    Raises:
        AssertionError: They do not; says what each has.
    """
    seen: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, repr(value))  # of two NaN, the texts are equal
    for rank, each in enumerate(seen):
        assert each == seen[0], f"{what}: rank 0 has {seen[0]}, rank {rank} has {each}"
