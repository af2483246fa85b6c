"""The training that is interrupted: run as `python tests/campaigns/restart_job.py DIRECTORY STRATEGY`.

It writes down every update with its samples, and at its end a hash of the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.callbacks import Callback
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.processes import rank
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.task import TaskModule
from drivetrain.trainer.trainer import Trainer

SAMPLES, BATCH, EPOCHS = 160, 4, 3
"""Of the data, of an update over all processes, and of the run."""

UPDATE = 0.02
"""Seconds that an update takes at least."""


class Noisy(TaskModule):
    """Two layers with dropout, so that the random streams matter, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        with torch.no_grad():
            for each in self.net.parameters():
                each.copy_(torch.randn(each.shape, generator=generator) * 0.3)

    def forward(self, features: Tensor) -> Tensor:
        """The prediction, `(batch, 1)`."""
        out: Tensor = self.net(features)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The squared error, some time later."""
        time.sleep(UPDATE)
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        """AdamW, with a rate that changes in every update."""
        return OptimizerConfig("adamw", lr=0.01, schedule="cosine", warmup_steps=5)


class Witness(Callback):
    """Writes down each update: its number, epoch, samples and time, in a file of this attempt and process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory

    def on_fit_start(self, run: Any) -> None:
        """Where this attempt begins; all processes know it by one name."""
        ranks = run.engine.ranks
        attempt = ranks.first(lambda: f"{time.time():.3f}")
        self._file = self._directory / f"witness-{attempt}-{ranks.rank}.jsonl"
        self._write(update=None, time=time.time())

    def on_step_end(self, run: Any) -> None:
        """What was learned from."""
        samples = [each for micro in run.window.micro_batches for each in micro.batch[2].tolist()]
        self._write(update=run.progress.updates, epoch=run.progress.epoch, samples=samples, time=time.time())

    def _write(self, **row: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def train(directory: Path, strategy: str, every: str = "1 epoch", workers: int = 0) -> None:
    """Train to the end, from the newest checkpoint on.

    Args:
        directory: Of the run and of what is written down.
        strategy: "single", "ddp" or "fsdp"; of several processes as many as a launcher has started, or two.
        every: When to save, beside at a signal.
        workers: Worker processes of the data.
    """
    torch.set_num_threads(1)
    launched = detect(os.environ)
    size = 1 if strategy == "single" else 2 if launched is None else launched.world_size
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 4, generator=generator)
    data = TensorDataset(features, features.sum(1, keepdim=True), torch.arange(SAMPLES))
    trainer = Trainer(
        max_epochs=EPOCHS,
        strategy="cpu" if size == 1 else strategy,
        devices=size if size > 1 else "auto",
        checkpoint=CheckpointConfig(every=every, by=None),
        callbacks=[Witness(directory)],
        loggers=(),
        progress_bar=False,
        run_dir=directory / "run",
    )
    task = Noisy()
    # One update is of as many samples, whatever the number of processes: the batch is that of all of them.
    loader = DataLoader(data, batch_size=BATCH // size, shuffle=True, num_workers=workers)
    trainer.fit(task, loader, resume="auto")
    if rank() == 0:
        told = b"".join(each.detach().numpy().tobytes() for each in task.state_dict().values())
        (directory / "done").write_text(hashlib.sha256(told).hexdigest(), encoding="ascii")


def main(words: Sequence[str]) -> None:
    """The command line: the directory, the strategy, the interval between saves, the number of workers."""
    directory, strategy, every, workers = words
    train(Path(directory), strategy, every, int(workers))


if __name__ == "__main__":
    main(sys.argv[1:])
