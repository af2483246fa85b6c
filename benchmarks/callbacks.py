"""What each callback adds to an update.

    python benchmarks/callbacks.py [--rounds 9] [--updates 300] [--only WeightAverage Freeze]

A network of 50 linear layers (100 parameters, 3.3 million elements) trains on one CPU thread with AdamW, and
logs every 50 updates. In each round every callback trains beside a bare run, in an order drawn anew, and the
median of the differences counts. Times are those of the thread, without what other programs take.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import TaskModule, Trainer, callbacks
from drivetrain.callbacks import Callback

WIDTH, LAYERS, WARM = 256, 50, 50

CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    'WeightAverage("ema")': lambda: [callbacks.WeightAverage(decay=0.99)],
    'WeightAverage("swa")': lambda: [callbacks.WeightAverage("swa", every="10 steps")],
    "GradientNorms": lambda: [callbacks.GradientNorms()],
    "GradientNorms(per_layer=True)": lambda: [callbacks.GradientNorms(per_layer=True)],
    "WeightHistograms": lambda: [callbacks.WeightHistograms()],
    "LearningRateMonitor": lambda: [callbacks.LearningRateMonitor()],
    "Throughput": lambda: [callbacks.Throughput()],
}


class Deep(TaskModule):
    """A deep, narrow network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self.net(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)


def seconds_per_update(made: list[Callback], updates: int) -> float:
    """Return the time of an update, without the first ones."""
    torch.manual_seed(0)
    batches = [(torch.randn(32, WIDTH), torch.randn(32, WIDTH)) for _ in range(WARM)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=updates + WARM, strategy="cpu", checkpoint=False, loggers=["tensorboard"],
            progress_bar=False, log_every=50, callbacks=made, run_dir=Path(folder) / "run",
        )  # fmt: skip
        start = 0.0
        gc.collect()
        for step in trainer.steps(Deep(), batches):
            if step.update == WARM - 1:
                start = time.thread_time()
        return (time.thread_time() - start) / updates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--only", nargs="+", default=[""], help="callbacks whose name contains one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [name for name in CALLBACKS if name == "none" or any(part in name for part in options.only)]
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for number in range(options.rounds):
        for name in random.Random(number).sample(chosen, len(chosen)):
            times[name].append(seconds_per_update(CALLBACKS[name](), options.updates))
    bare = times["none"]
    print("| callback | us of an update | added us | added |\n| --- | ---: | ---: | ---: |")
    for name, found in times.items():
        added = statistics.median(one - other for one, other in zip(found, bare, strict=True))
        share = added / statistics.median(bare)
        print(f"| {name} | {statistics.median(found) * 1e6:,.0f} | {added * 1e6:+,.0f} | {share:+.1%} |")


if __name__ == "__main__":
    main()
