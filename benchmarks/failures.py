"""How soon a failure of one rank ends all, and what is said last: `python benchmarks/failures.py`.

A training of two processes, each fault in a program of its own. The time is that from the fault to the end of
the last process, its interpreter's included. `--strategy fsdp` tries it under another strategy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FAULTS = {
    "raises": "raise ValueError('a bad sample')",
    "raises in a worker of its loader": "",
    "is killed (SIGKILL)": "os.kill(os.getpid(), signal.SIGKILL)",
    "leaves by os._exit": "os._exit(3)",
    "is stopped (SIGSTOP)": "os.kill(os.getpid(), signal.SIGSTOP)",
    "sleeps for ever": "time.sleep(1e6)",
    "makes another collective": "torch.distributed.all_reduce(torch.ones(1))",
    "waits where no other does": "torch.distributed.barrier(self.others)",
}
"""What rank 1 does after its third step."""

PROGRAM = """
import os, signal, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from drivetrain import Callback, TaskModule, Trainer, rank

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if BAD and index == 120:
            note()
            raise ValueError("a bad sample")
        return torch.full((4,), index / 400), torch.ones(1)

class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x):
        return self.net(x)

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[1])

def note():
    with open("fault", "w") as file:
        file.write(repr(time.time()))

class Acts(Callback):
    def on_fit_start(self, run):
        self.others = torch.distributed.new_group()

    def on_step_end(self, run):
        if run.progress.steps == 3 and not BAD:
            if rank() == 1:
                note()
                ACT

Trainer(
    strategy=STRATEGY, devices=2, max_epochs=3, callbacks=[Acts()], run_dir="run", loggers=(),
    progress_bar=False, hang_timeout=5.0,
).fit(Line(), DataLoader(Rows(), batch_size=4, num_workers=1 if BAD else 0))
"""


def ended(fault: str, strategy: str) -> tuple[float, int, str]:
    """Seconds from a fault to the end of all, the exit code, and the last line.

    Raises:
        RuntimeError: The fault did not happen, or nothing ended within two minutes.
    """
    text = PROGRAM.replace("ACT", FAULTS[fault] or "pass").replace("STRATEGY", repr(strategy))
    text = text.replace("BAD", str(not FAULTS[fault]))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=directory,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        now, noted = time.time(), Path(directory) / "fault"
        if not noted.exists():
            raise RuntimeError(f"rank 1 did not come to its fault:\n{done.stderr}")
        lines = [each for each in done.stderr.splitlines() if each.strip()]
        return now - float(noted.read_text(encoding="utf-8")), done.returncode, lines[-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), help="which faults")
    wanted = parser.parse_args()
    print(
        f"| rank 1 of 2, under {wanted.strategy!r} | seconds until all have ended | exit code | last line |"
    )
    print("| --- | ---: | ---: | --- |")
    for fault in wanted.only:
        seconds, code, last = ended(fault, wanted.strategy)
        print(f"| {fault} | {seconds:.1f} | {code} | {last} |", flush=True)


if __name__ == "__main__":
    main()
