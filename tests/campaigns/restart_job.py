"""The training that is interrupted: it writes down every step, and at its end a hash of the weights."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, TaskModule, Trainer
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.processes import rank

SAMPLES, BATCH, EPOCHS = 160, 4, 3  # of the data, of a step over all processes, and of the run


class Noisy(TaskModule):  # two layers with dropout, so that the random streams matter, and a schedule
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        time.sleep(0.02)
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01, schedule="cosine", warmup_steps=5)


class Witness(Callback):
    """Writes down each step: its number, epoch, samples and time, in a file of this attempt and process."""

    def __init__(self, directory: Path) -> None:
        self._file = self._directory = directory

    def on_fit_start(self, run: Any) -> None:
        attempt = run.engine.ranks.first(lambda: f"{time.time():.3f}")  # one name for all processes
        self._file = self._directory / f"witness-{attempt}-{run.engine.ranks.rank}.jsonl"
        self._write(step=None, time=time.time())

    def on_step_end(self, run: Any) -> None:
        samples = [each for micro in run.window.micro_batches for each in micro.batch[2].tolist()]
        self._write(step=run.progress.steps, epoch=run.progress.epoch, samples=samples, time=time.time())

    def _write(self, **row: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def train(directory: Path, strategy: str, every: str, workers: int) -> None:
    """Train to the end, from the newest checkpoint on, on the ranks that a launcher has started, or two."""
    torch.set_num_threads(1)
    launched = detect(os.environ)
    size = 1 if strategy == "single" else 2 if launched is None else launched.world_size
    features = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
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
    # One step is of as many samples, whatever the number of processes: the batch is that of all of them.
    loader = DataLoader(data, batch_size=BATCH // size, shuffle=True, num_workers=workers)
    trainer.fit(task, loader, resume="auto")
    if rank() == 0:
        told = b"".join(each.detach().numpy().tobytes() for each in task.state_dict().values())
        (directory / "done").write_text(hashlib.sha256(told).hexdigest(), encoding="ascii")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
