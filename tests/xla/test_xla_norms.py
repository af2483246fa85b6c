"""Batch norms under XLA take the same statistics from a batch as torch does on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.xla import Counts, apart, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import OptimizerConfig, TaskModule, Trainer
from drivetrain.callbacks import LambdaCallback

NAMES = [("xla", 1), ("xla_fsdp", 1), ("xla_fsdp_v2", 2)]

Buffers = list[dict[str, Tensor]]


class Own(nn.BatchNorm1d):
    """One of a user's: its own forward, with torch's buffers, as those of timm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(input=x).relu()


class Images(TaskModule):
    """Norms of each kind on pictures, with layers before them that have no bias: its gradient would be zero,
    and what is left of it by rounding differs.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.ModuleList([nn.BatchNorm1d(4, affine=False), Own(4, momentum=0.3)])
        self.plane = nn.ModuleList([nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=None)])
        self.solid = nn.BatchNorm3d(4, momentum=0.5)
        self.samples = nn.InstanceNorm2d(4, track_running_stats=True)
        self.fixed = nn.BatchNorm2d(4).eval()
        self.none = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.plane:
            x = each(x)
        x = self.none(self.fixed(self.samples(x)).tanh())
        x = self.solid(x.unsqueeze(-1)).squeeze(-1)
        x = self.solid(x.square().unsqueeze(-1)).squeeze(-1)  # once more
        x = self.flat[1](x.flatten(2))
        return self.head(self.flat[0](x.square().mean(-1)))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.005)


class Plain(Images):
    """One norm, whose momentum is a number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat[1](self.plane[0](x).flatten(2)).mean(-1))


def pictures(samples: int) -> TensorDataset:
    x = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(1)) * 2 + 1
    return TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1))


def fitted(task: Images, trainer_of: Any) -> tuple[Buffers, float]:
    """The buffers after each update of two micro-batches of 8, or one of 5; the validation's loss."""
    seen: Buffers = []

    def note(run: Any) -> None:
        seen.append({name: each.detach().cpu().clone() for name, each in run.task.named_buffers()})

    made = trainer_of(callbacks=[LambdaCallback(on_step_end=note)], gradient_accumulation_steps=2)
    found = made.fit(task, DataLoader(pictures(21), batch_size=8), DataLoader(pictures(21), batch_size=5))
    return seen, found.metrics["validation/loss"]


def on_cpu(**options: Any) -> Trainer:
    quiet: dict[str, Any] = {"max_epochs": 2, "progress_bar": False, "checkpoint": False, "loggers": ()}
    return Trainer(strategy="cpu", **quiet, **options)


@pytest.mark.parametrize(("name", "devices"), NAMES)
def test_buffers_and_validation_are_those_of_the_cpu(name: str, devices: int) -> None:
    def run() -> None:
        def theirs(**options: Any) -> Trainer:
            return trainer(name, None, devices, **options)

        task = Images()
        start = copy.deepcopy(task)
        buffers, loss = fitted(task, theirs)
        expected, expected_loss = fitted(start, on_cpu)
        torch.testing.assert_close(buffers, expected, rtol=1e-4, atol=1e-5)
        assert task.fixed.num_batches_tracked == 0
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in task.modules())
        seen = Counts()
        theirs(callbacks=[seen]).fit(Plain(), DataLoader(pictures(24), batch_size=8))
        assert seen.updates[3:] == [{"compiled": 0, "run": 1, "copied": 0}] * 3

    apart(run)
