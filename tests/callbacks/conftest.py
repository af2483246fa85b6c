"""A short drive: a small task that the real Trainer runs, with callbacks along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import LambdaCallback, OptimizerConfig, TaskModule


# A line through 16 features, in two layers; see `Drive` for its training loss and validations.
class Line(TaskModule):
    def __init__(self, net: nn.Module | None, results: Any, step: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))
        self.results, self.step = list(results or ()), step

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.05)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.step(self, batch) if self.step else self(batch).square().mean()

    def validation_step(self, batch: Tensor) -> dict[str, Tensor]:
        values = self.results.pop(0) if self.results else {"loss": 1.0}
        return {name: torch.tensor(value) for name, value in values.items()}


def batches(count: int, seed: int = 1) -> list[Tensor]:
    return list(torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(seed)))


class Drive:  # one task, its data and the Trainer's arguments
    def __init__(
        self,
        *callbacks: Any,
        epochs: int = 1,
        steps_per_epoch: int = 4,
        log_every: int = 2,
        results: Sequence[Mapping[str, float]] | None = None,  # what each validation gives, one an epoch
        run_dir: Path | None = None,
        is_main: bool = True,  # False makes the callbacks believe that they are on another rank
        step: Callable[[nn.Module, Tensor], Tensor] | None = None,
        net: nn.Module | None = None,
        on_nonfinite: str = "raise",
    ) -> None:
        self.task: Any = Line(net, results, step)
        self.train_data = batches(steps_per_epoch)
        self.validation_data = None if results is None else batches(1, seed=2)
        self.history: list[dict[str, float]] = []  # what was logged at each log point
        self.run: Any = None

        def meet(run: Any) -> None:
            self.run, run.is_main = run, is_main

        meeting = LambdaCallback(on_fit_start=meet, on_evaluation_start=meet)
        logger = SimpleNamespace(
            log_metrics=lambda metrics, step: self.history.append(dict(metrics)),
            log_config=lambda config: None,
            close=lambda: None,
        )
        saving: Any = {"checkpoint": run_dir is not None, "run_dir": run_dir, "on_nonfinite": on_nonfinite}
        options: Any = {"max_epochs": epochs, "log_every": log_every, "loggers": logger, **saving}
        self.trainer = quiet(**options, callbacks=[meeting, *callbacks])

    def fit(self, resume: str | None = None) -> Drive:
        self.trainer.fit(self.task, self.train_data, self.validation_data, resume=resume)
        return self

    @property
    def progress(self) -> Any:
        return self.run.progress

    @property
    def stopped_early(self) -> str | None:  # why the fit ended before its planned end
        return None if self.run.stop_reason.startswith("max_epochs") else self.run.stop_reason


@pytest.fixture
def drive() -> type[Drive]:  # the class, to be called with the callbacks
    return Drive
