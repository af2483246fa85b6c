"""A short drive: a small task that the real Trainer runs, with callbacks along."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import LambdaCallback, OptimizerConfig, TaskModule, Trainer


class Line(TaskModule):
    """A straight line through 16 features, in two layers. What a test wants otherwise are attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))
        self.step: Callable[[nn.Module, Tensor], Tensor] | None = None
        self.results: list[Mapping[str, float]] = []  # of each validation batch
        self.seconds: dict[str, float] = {}  # how long each part takes at least
        self.tokens_per_batch = 0
        self.weightless = 0  # batches at the start with weight zero

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.05)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Tensor) -> Tensor:
        time.sleep(self.seconds.get("compute", 0.0))
        return self.step(self, batch) if self.step else self(batch).square().mean()

    def validation_step(self, batch: Tensor) -> dict[str, Tensor]:
        time.sleep(self.seconds.get("evaluation", 0.0))
        values = self.results.pop(0) if self.results else {"loss": 1.0}
        return {name: torch.tensor(value) for name, value in values.items()}

    def tokens(self, batch: Tensor) -> int:
        return self.tokens_per_batch

    def loss_weight(self, batch: Tensor) -> float:
        self.weightless -= 1
        return 0.0 if self.weightless >= 0 else len(batch)


class SlowBatches:
    """Batches that take a while to come."""

    def __init__(self, batches: Sequence[Tensor], seconds: float) -> None:
        self.batches = batches
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


class Memory:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.points.append(dict(metrics))

    def log_config(self, config: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def batches(count: int, seed: int = 1) -> list[Tensor]:
    return list(torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(seed)))


class Drive:
    """One task, its data and the Trainer's arguments.

    Args:
        callbacks: What is tested.
        results: What each validation gives, one validation of one batch after each epoch; None for none.
        run_dir: Where to save checkpoints; None for no checkpoints.
        is_main: False makes the callbacks believe that they are on another rank.
        seconds: How long "data" (a batch), "compute" (an update), "evaluation" (a batch) and "save" (an
            update) take at least.
        step: Gives the training loss from the task and a batch, in place of the task's own step.
        net: The model, in place of the task's own.
        tokens: In a batch.
        weightless: How many batches at the start have weight zero.
        on_nonfinite: As the Trainer's.
    """

    def __init__(
        self,
        *callbacks: Any,
        epochs: int = 1,
        updates_per_epoch: int = 4,
        log_every: int = 2,
        results: Sequence[Mapping[str, float]] | None = None,
        run_dir: Path | None = None,
        is_main: bool = True,
        seconds: Mapping[str, float] | None = None,
        step: Callable[[nn.Module, Tensor], Tensor] | None = None,
        net: nn.Module | None = None,
        tokens: int = 0,
        weightless: int = 0,
        on_nonfinite: str = "raise",
    ) -> None:
        self.task = Line()
        self.task.step, self.task.tokens_per_batch, self.task.weightless = step, tokens, weightless
        self.task.results = list(results or ())
        self.task.seconds = dict(seconds or {})
        if net is not None:
            self.task.net = net
        self.train_data: Any = batches(updates_per_epoch)
        if "data" in self.task.seconds:
            self.train_data = SlowBatches(self.train_data, self.task.seconds["data"])
        self.validation_data = None if results is None else batches(1, seed=2)
        self.memory = Memory()
        self.run: Any = None
        self.is_main = is_main
        watch = LambdaCallback(on_fit_start=self.meet, on_evaluation_start=self.meet, on_save=self.save)
        self.trainer = Trainer(
            max_epochs=epochs,
            log_every=log_every,
            checkpoint=run_dir is not None,
            callbacks=[watch, *callbacks],
            loggers=self.memory,
            progress_bar=False,
            run_dir=run_dir,
            on_nonfinite=on_nonfinite,
        )

    def meet(self, run: Any) -> None:
        self.run = run
        run.is_main = self.is_main

    def save(self, run: Any) -> None:
        with run.timed("save"):
            time.sleep(self.task.seconds.get("save", 0.0))

    def fit(self, resume: str | None = None) -> Drive:
        self.trainer.fit(self.task, self.train_data, self.validation_data, resume=resume)
        return self

    @property
    def history(self) -> list[dict[str, float]]:
        """What was logged at each log point."""
        return self.memory.points

    @property
    def progress(self) -> Any:
        return self.run.progress

    @property
    def stopped_early(self) -> str | None:
        """Why the fit ended before its planned end."""
        return None if self.run.stop_reason.startswith("max_epochs") else self.run.stop_reason


@pytest.fixture
def drive() -> type[Drive]:
    """The class, to be called with the callbacks."""
    return Drive
