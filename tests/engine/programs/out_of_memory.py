"""Train with `micro_batch="auto"` under a limit on memory; the updates are those of whole batches."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import OptimizerConfig, TaskModule, Trainer


class Wide(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features).tanh()
        for _ in range(4):  # 64 kB for a sample, twice
            hidden = hidden.repeat(1, 256).sin().reshape(len(features), -1, 64).mean(1)
        return self.last(hidden)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


torch.set_num_threads(1)
features = torch.randn(1024, 8, generator=torch.Generator().manual_seed(1))
data = [(each, each.sum(1, keepdim=True)) for each in features.split(512)]
options: dict[str, Any] = {"strategy": "cpu", "max_epochs": 1, "checkpoint": False, "loggers": ()}
whole, task = Wide(), Wide()
Trainer(micro_batch=16, progress_bar=False, **options).fit(Wide(), data)  # everything is imported and started
used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, hard))
Trainer(micro_batch="auto", progress_bar=True, **options).fit(task, data)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
Trainer(progress_bar=False, **options).fit(whole, data)
for one, two in zip(whole.parameters(), task.parameters(), strict=True):
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
sys.stdout.write("equal\n")
