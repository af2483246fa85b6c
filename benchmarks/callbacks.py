"""What each callback adds to a step.

    python benchmarks/callbacks.py [--rounds 9] [--steps 300] [--only WeightAverage Freeze]

A network of 50 linear layers (100 parameters, 13,600 elements) trains on one CPU thread with AdamW, and logs
every 50 steps. In each round every callback trains after or before a bare run, in an order drawn anew. The
fastest 50 steps with their log point count, of all rounds with the callback and of all without it. Times
are those of the thread, without what other programs take.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import TaskModule, Trainer, callbacks
from drivetrain.callbacks import Callback

WIDTH, LAYERS, LOG_EVERY = 16, 50, 50

CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    'WeightAverage("ema")': lambda: [callbacks.WeightAverage(decay=0.99)],
    'WeightAverage("swa")': lambda: [callbacks.WeightAverage("swa", every="10 steps")],
    "GradientNorms": lambda: [callbacks.GradientNorms()],
    "GradientNorms(per_layer=True)": lambda: [callbacks.GradientNorms(per_layer=True)],
    "DeviceStats": lambda: [callbacks.DeviceStats()],
    "LearningRateMonitor": lambda: [callbacks.LearningRateMonitor()],
    "Throughput": lambda: [callbacks.Throughput()],
    'Profile(kinds="table")': lambda: [callbacks.Profile(kinds="table")],
    "Freeze, after its last point": lambda: [callbacks.Freeze("net.0", until="10 steps")],
    'EarlyStopping("train/loss")': lambda: [callbacks.EarlyStopping("train/loss", patience=1000)],
    "LossSpike": lambda: [callbacks.LossSpike("skip", threshold=1000.0)],
    "NonFiniteDetector": lambda: [callbacks.NonFiniteDetector()],
}


class Deep(TaskModule):
    """A deep, narrow network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self.net(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def seconds_per_step(made: list[Callback], steps: int) -> float:
    """Return the time of a step in the fastest part of a run, without the first ones."""
    torch.manual_seed(0)
    batches = [(torch.randn(32, WIDTH), torch.randn(32, WIDTH)) for _ in range(LOG_EVERY)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=steps + LOG_EVERY, strategy="cpu", checkpoint=False, loggers=["tensorboard"],
            progress_bar=False, log_every=LOG_EVERY, callbacks=made, run_dir=Path(folder) / "run",
        )  # fmt: skip
        times = []
        gc.collect()
        for result in trainer.steps(Deep(), batches):
            if (result.step + 1) % LOG_EVERY == 0:
                times.append(time.thread_time())
        return min(end - start for start, end in pairwise(times)) / LOG_EVERY


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 50")
    parser.add_argument("--only", nargs="+", default=[""], help="callbacks whose name contains one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [name for name in CALLBACKS if any(part in name for part in options.only)]
    times: dict[str, list[dict[bool, float]]] = {name: [] for name in chosen}
    for number in range(options.rounds):
        draw = random.Random(number)
        for name in draw.sample(chosen, len(chosen)):
            pair = {
                bare: seconds_per_step([] if bare else CALLBACKS[name](), options.steps)
                for bare in draw.sample([False, True], 2)
            }
            times[name].append(pair)
    bare = statistics.median(pair[True] for pairs in times.values() for pair in pairs)
    print(
        f"A bare step takes {bare * 1e6:,.0f} us.\n\n| callback | added us | added |\n| --- | ---: | ---: |"
    )
    for name, pairs in times.items():
        added = min(pair[False] for pair in pairs) - min(pair[True] for pair in pairs)
        print(f"| `{name}` | {added * 1e6:+,.0f} | {added / bare:+.1%} |")


if __name__ == "__main__":
    main()
