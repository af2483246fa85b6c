"""A task and its data, as small as they can be, for the promises of README.md."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import OptimizerConfig, TaskModule

QUIET: dict[str, Any] = {"loggers": (), "progress_bar": False}


class Line(TaskModule):  # learns a sum of four numbers
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(outputs, batch["y"])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.05, schedule="cosine")


def samples(count: int) -> list[dict[str, Tensor]]:  # numbered samples for `Line`
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "y": row.sum(), "number": torch.tensor(number)} for number, row in enumerate(x)]


def batches(count: int, size: int, **options: Any) -> DataLoader[Any]:  # a loader of so many samples
    return DataLoader(samples(count), batch_size=size, **options)  # type: ignore[arg-type]


def weights(task: TaskModule) -> Tensor:  # all parameters in one vector
    return torch.cat([each.detach().flatten() for each in task.parameters()])
