"""Handwritten digits: train, resume from a checkpoint, test and predict, in well under a minute on a CPU.

    python examples/digits.py
    cd examples && drivetrain fit --task digits.Digits --data digits.data --trainer.max_epochs 3

The images are scikit-learn's: 1,797 digits of 8 by 8 pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import (
    CheckpointConfig,
    LambdaCallback,
    LearningRateMonitor,
    OptimizerConfig,
    TaskModule,
    Throughput,
    Trainer,
)


class Digits(TaskModule):
    def __init__(self, hidden: int = 128, learning_rate: float = 1e-2):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.loss = nn.CrossEntropyLoss()  # of the outputs and the batch's "label"
        self.metrics = {"accuracy": MulticlassAccuracy(10)}  # torchmetrics-style objects
        self.learning_rate = learning_rate

    def forward(self, image):  # the model; its parameter names pick the batch's columns
        return self.net(image)

    def configure_optimizers(self):
        return OptimizerConfig("adamw", lr=self.learning_rate, schedule="cosine", warmup_steps=20)


class DigitImages(Dataset):
    """A part of the data set: images of shape (8, 8) between 0 and 1, labels from 0 to 9.

    With `jitter` each access moves the image by up to a pixel.
    """

    def __init__(self, indices: torch.Tensor, jitter: bool = False):
        self.jitter = jitter
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[indices] / 16
        self.labels = torch.tensor(digits.target)[indices]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.jitter:
            top, left = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[top : top + 8, left : left + 8]
        return {"image": image, "label": self.labels[index]}


class DigitsData:
    """1,197 images to train on, 300 to validate, 300 to test; the split is always the same."""

    def __init__(self, batch_size: int = 32):
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        training, *others = order.split([1197, 300, 300])
        self.parts = [DigitImages(training, jitter=True), *map(DigitImages, others)]
        self.batch_size = batch_size

    def train_data(self):
        return DataLoader(self.parts[0], batch_size=self.batch_size, shuffle=True)

    def validation_data(self):
        return DataLoader(self.parts[1], batch_size=100)

    def test_data(self):
        return DataLoader(self.parts[2], batch_size=100)

    def predict_data(self):
        return self.test_data()


data = DigitsData


def new_directory(wanted: Path) -> Path:
    """Return the directory, or the first free one with a number appended; earlier files stay unchanged."""
    number, path = 1, wanted
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/digits"), help="where files go")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    run_dir = new_directory(given.run_dir)
    torch.manual_seed(0)
    digits = DigitsData()
    arguments = {
        "max_epochs": 80,
        "run_dir": run_dir,
        "checkpoint": CheckpointConfig(every="1 epoch", by="validation/accuracy", mode="max"),
        "loggers": ("tensorboard", "csv"),
        "strategy": given.strategy,
        "devices": given.devices or "auto",
        "precision": given.precision,
    }
    callbacks = [LearningRateMonitor(), Throughput()]

    def stop_half_way(run):
        if run.progress.epoch == 40:
            run.stop("half way")

    print("== the plan")
    interrupted = Trainer(callbacks=[*callbacks, LambdaCallback(on_epoch_end=stop_half_way)], **arguments)
    interrupted.plan(Digits(hidden=1024, learning_rate=3e-3), digits)
    print("== train, and stop half way")
    interrupted.fit(Digits(hidden=1024, learning_rate=3e-3), digits)

    print("== resume from the newest checkpoint, as if nothing had happened")
    trainer = Trainer(callbacks=callbacks, **arguments)
    task = Digits(hidden=1024, learning_rate=3e-3)
    result = trainer.fit(task, digits, resume="auto")

    print("== test and predict")
    accuracy = trainer.test(task, digits)["test/accuracy"]
    predicted = torch.cat(trainer.predict(task, digits)).argmax(-1)
    true = digits.parts[2].labels
    print(f"test accuracy {accuracy:.1%}")
    print("predicted", predicted[:20].tolist())
    print("true     ", true[:20].tolist())

    print(f"== files in {run_dir}")
    for path in sorted(run_dir.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>10,}  {path.relative_to(run_dir)}")
    print(f"best checkpoint: {result.best_checkpoint}")
    if accuracy < 0.97:
        raise SystemExit(f"the test accuracy is {accuracy:.1%}, below 97 %")


if __name__ == "__main__":
    main()
