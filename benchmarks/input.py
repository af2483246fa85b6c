"""What waiting for data costs: until the first step, at the border of two epochs, and within an epoch.

Samples are unpacked with zlib by two worker processes, which is work like that of decoding an image. The same
fit is run, in turns, with workers that are started for every epoch, the first ones after the set-up
(`DataLoader(..., num_workers=2)`, and a callback at the start of an epoch), and with workers that are started
during the set-up, stay, and go on into the next epoch (a bare dataset with `Trainer(num_workers=2)`). Medians
in microseconds; "first step" is from the call of `fit` to the end of the first step.

    python benchmarks/input.py [--rounds 5] [--epochs 4]
"""

from __future__ import annotations

import argparse
import statistics
import zlib
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, OptimizerConfig, TaskModule, Trainer

SAMPLES, BATCH, FEATURES = 256, 16, 256


class Packed(Dataset[Tensor]):
    """Packed numbers, of which a sample is unpacked a number of times."""

    batch_size = BATCH

    def __init__(self, times: int) -> None:
        self.times = times
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(100, (SAMPLES, FEATURES * 16), generator=generator, dtype=torch.uint8)
        self.packed = [zlib.compress(row.numpy().tobytes()) for row in rows]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        for _ in range(self.times):
            raw = zlib.decompress(self.packed[index])
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[:FEATURES].float() / 100


class Wide(TaskModule):
    """Three layers, whose step takes about as long as two workers take for a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 1)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        """What is set up takes a while here, as placing a large model does."""
        nn.init.orthogonal_(self.net[2].weight)
        return OptimizerConfig("sgd", lr=0.01)


class Waits(Callback):
    """Notes how long each step waited for its data."""

    def __init__(self) -> None:
        self.begun = perf_counter()
        self.first = 0.0
        self.borders: list[float] = []
        self.within: list[float] = []
        self._before = 0.0

    def on_step_start(self, run: Any) -> None:
        """The step's data is there."""
        waited, self._before = run.timing["data"] - self._before, run.timing["data"]
        if run.progress.steps:
            (self.within if run.progress.epoch_steps else self.borders).append(waited)

    def on_step_end(self, run: Any) -> None:
        """The first step is made."""
        self.first = self.first or perf_counter() - self.begun


class Late(Callback):
    """A callback that may change the dataset before workers get their copy of it."""

    def on_epoch_start(self, run: Any) -> None:
        """Changes nothing."""


def measure(stays: bool, epochs: int, times: int) -> Waits:
    """One fit."""
    dataset, task = Packed(times), Wide()
    data: Any = dataset if stays else DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=2)
    waits = Waits()
    callbacks: list[Callback] = [waits] if stays else [waits, Late()]
    Trainer(
        max_epochs=epochs,
        strategy="cpu",
        num_workers=2,
        callbacks=callbacks,
        checkpoint=False,
        loggers=(),
        progress_bar=False,
    ).fit(task, data)
    return waits


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--times", type=int, default=8, help="how often a sample is unpacked")
    asked = parser.parse_args()
    found: dict[bool, list[Waits]] = {False: [], True: []}
    for _ in range(asked.rounds):
        for stays, all_waits in found.items():
            all_waits.append(measure(stays, asked.epochs, asked.times))
    print(f"{'microseconds':32}{'first step':>14}{'border':>10}{'within':>10}")
    for stays, all_waits in found.items():
        figures = (
            statistics.median(each.first for each in all_waits),
            statistics.median(one for each in all_waits for one in each.borders),
            statistics.median(one for each in all_waits for one in each.within),
        )
        first, border, within = (f"{seconds * 1e6:,.0f}" for seconds in figures)
        name = "workers that stay and go on" if stays else "workers started in every epoch"
        print(f"{name:32}{first:>14}{border:>10}{within:>10}")


if __name__ == "__main__":
    main()
