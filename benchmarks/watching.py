"""What loggers and progress bars add to a step between two log points.

    python benchmarks/watching.py [--rounds 15] [--steps 2000]

A line trains on one CPU thread. In each round each option trains before or after a bare run, in an order
drawn anew. The steps around a log point, two in 50, do not count. Bars are drawn on a terminal that a thread
reads, and their drawings count. Times are those of the thread, without what other programs take; the median
of all rounds is shown.
"""

from __future__ import annotations

import argparse
import os
import pty
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import TaskModule, Trainer

LOG_EVERY = 50

OPTIONS: dict[str, dict[str, Any]] = {
    "three loggers": {"loggers": ("tensorboard", "csv", "jsonl")},
    'progress_bar="tqdm"': {"progress_bar": "tqdm"},
    'progress_bar="rich"': {"progress_bar": "rich"},
}


class Line(TaskModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self.line(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return lambda parameters: torch.optim.SGD(parameters, lr=1e-3)


@contextmanager
def terminal() -> Iterator[None]:
    """Make stderr a terminal of 24 lines whose output is dropped."""
    main, other = pty.openpty()
    os.set_blocking(main, True)

    def drain() -> None:
        while os.read(main, 65536)[-1:] != b"\x04":
            pass

    reader, before = threading.Thread(target=drain), sys.stderr
    reader.start()
    with os.fdopen(other, "w") as stream:
        import termios

        termios.tcsetwinsize(stream.fileno(), (24, 120))
        sys.stderr = stream
        try:
            yield
        finally:
            sys.stderr = before
            stream.write("\x04")
            stream.flush()
            reader.join()
    os.close(main)


def seconds_per_step(options: dict[str, Any], steps: int) -> float:
    """Return the time of a step between two log points, with what is drawn meanwhile."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(LOG_EVERY)]
    with tempfile.TemporaryDirectory() as folder, terminal():
        given = {"loggers": (), "progress_bar": False, "run_dir": Path(folder) / "run", **options}
        trainer = Trainer(max_steps=steps, strategy="cpu", checkpoint=False, log_every=LOG_EVERY, **given)
        spent = counted = 0.0
        began = 0.0
        for result in trainer.steps(Line(), batches):
            place = (result.step + 1) % LOG_EVERY  # the log point follows the step of place 0
            if place == 1:
                began = time.thread_time()
            elif place == LOG_EVERY - 1 and result.step > LOG_EVERY:
                spent, counted = spent + time.thread_time() - began, counted + LOG_EVERY - 2
        return spent / counted


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2000, help="a multiple of 50")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TERM"] = "xterm"
    added: dict[str, list[float]] = {name: [] for name in OPTIONS}
    bare: list[float] = []
    for number in range(options.rounds):
        draw = random.Random(number)
        for name in draw.sample(list(OPTIONS), len(OPTIONS)):
            pair = {
                is_bare: seconds_per_step({} if is_bare else OPTIONS[name], options.steps)
                for is_bare in draw.sample([False, True], 2)
            }
            added[name].append(pair[False] - pair[True])
            bare.append(pair[True])
    print(
        f"A bare step takes {statistics.median(bare) * 1e6:,.1f} us.\n\n| with | added us |\n| --- | ---: |"
    )
    for name, each in added.items():
        print(f"| `{name}` | {statistics.median(each) * 1e6:+,.1f} |")


if __name__ == "__main__":
    main()
