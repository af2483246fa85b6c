"""The time that a step of a LightningModule takes through `as_task`, beside the same task of ours.

    python benchmarks/lightning_adapter.py [steps]

Both train a small linear model on one CPU thread, and log the loss in every step. The two kinds of run
alternate, and the median of the differences counts. Times are those of the thread, without what other
programs take.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from drivetrain import TaskModule, Trainer
from drivetrain.integrations.lightning import as_task


class Native(TaskModule):
    """The model as a task of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 2)

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self.net(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.01)


class Module(LightningModule):
    """The same as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds_per_step(task: TaskModule, steps: int) -> float:
    """Return the time of a step, without the first 50."""
    batches = [(torch.randn(8, 32), torch.randn(8, 2)) for _ in range(50)]
    trainer = Trainer(
        max_steps=steps + 50, strategy="cpu", checkpoint=False, loggers=(), progress_bar=False, log_every=50
    )
    start = 0.0
    for result in trainer.steps(task, batches):
        if result.step == 49:
            start = time.thread_time()
    return (time.thread_time() - start) / steps


def main() -> None:
    """Print the times of both and their difference."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    torch.set_num_threads(1)
    native, adapted = [], []
    for _ in range(9):
        native.append(seconds_per_step(Native(), steps))
        adapted.append(seconds_per_step(as_task(Module()), steps))
    differences = [second - first for first, second in zip(native, adapted, strict=True)]
    print(f"native task {statistics.median(native) * 1e6:.1f} us per step")
    print(f"as_task     {statistics.median(adapted) * 1e6:.1f} us per step")
    print(f"difference  {statistics.median(differences) * 1e6:.1f} us (at most 30)")


if __name__ == "__main__":
    main()
