"""Two checkouts of drivetrain, measured in pairs: whether starts, saves and evaluations have become slower.

    python benchmarks/before_after_runs.py OLD NEW [--only TEXT ...] [--rounds 7]

In a round each checkout runs each row once, in a new process and in a random order. A row's figure is the
median over all rounds of new / old. `before_after.py` measures steps.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import os, sys, time
begun = time.perf_counter()
import torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import CheckpointConfig, TaskModule, Trainer

class Regression(TaskModule):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))
    def forward(self, x):
        return self.net(x)
    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs[:, 0], batch[1])

def data(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x.sum(1))

if __name__ == "__main__":
    quiet = {"batch_size": 8, "progress_bar": False, "loggers": (), "log_every": "50 steps"}
    if sys.argv[1] == "start":
        trainer = Trainer(max_steps=1, strategy="ddp", devices=2, checkpoint=False, **quiet)
        trainer.fit(Regression(), data(64))
    elif sys.argv[1] == "save":
        saves = CheckpointConfig(every="1 steps", keep_last=2)
        trainer, task = Trainer(max_steps=40, strategy="cpu", checkpoint=saves, **quiet), Regression(40_000)
        begun = time.perf_counter()
        trainer.fit(task, data(64))
    else:
        trainer, task, samples = Trainer(strategy="cpu", **quiet), Regression(), data(24_000)
        begun = time.perf_counter()
        trainer.validate(task, samples)
    if os.environ.get("RANK", "0") == "0":
        print(time.perf_counter() - begun)
"""
ROWS = {
    "start": "start of two ranks, one step, end",
    "save": "40 steps with a save of 16 MB each",
    "evaluation": "evaluation of 3,000 batches",
}


def seconds(root: Path, row: str) -> float:
    """Return the seconds of a row in a new process with a checkout's package."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(program), row],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root / "package"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
    if done.returncode:
        raise RuntimeError(f"{root}, row {row!r}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the root of a checkout")
    parser.add_argument("new", type=Path, help="the root of another")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS), help="rows to run")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default: %(default)s)")
    plan = parser.parse_args(argv)
    print(f"Seconds, medians of {plan.rounds} rounds; new / old with its quartiles.\n")
    print("| row | old | new | new / old |\n|---|---:|---:|---:|")
    for row in plan.only:
        rounds = []
        for _ in range(plan.rounds):
            roots = [("old", plan.old.resolve()), ("new", plan.new.resolve())]
            rounds.append({name: seconds(root, row) for name, root in random.sample(roots, len(roots))})
        ratios = sorted(each["new"] / each["old"] for each in rounds)
        old, new = (statistics.median(each[name] for each in rounds) for name in ("old", "new"))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        spread = f"{statistics.median(ratios):.3f} ({low:.3f} .. {high:.3f})"
        print(f"| {ROWS[row]} | {old:.2f} | {new:.2f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
