"""Print the rows of the first page's table of strategies: `python docs/site/print_strategy_differences.py`.

Each strategy trains the task of that page on a CPU, 135 steps of 32 samples, which several processes share.
A row compares the weights at the end with those of one process, and has the bytes that `Trainer.plan` gives
for parameters, gradients and the optimizer's state in each process.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from drivetrain import Trainer, rank

FIRST_PAGE = Path(__file__).parents[1] / "README.md"
RUNS = [
    ("cpu", 1),
    ("ddp", 2),
    ("ddp", 4),
    ("fsdp", 2),
    ("fsdp", 4),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
]
RUNS += [("accelerate", 2)]


def first_page() -> dict[str, Any]:
    """Return the task and the data of the first page."""
    text = FIRST_PAGE.read_text(encoding="utf-8")
    block = next(each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "class Digits" in each)
    found: dict[str, Any] = {"__name__": "page"}
    exec(block.partition("\ntrainer = ")[0], found)
    return found


def train(strategy: str, processes: int, directory: str) -> None:
    """Train in this process, and in those that it starts; print the bytes of each process."""
    page = first_page()
    options: dict[str, Any] = {"devices": processes} if processes > 1 else {}
    quiet: dict[str, Any] = {"loggers": (), "progress_bar": False}
    trainer = Trainer(
        max_epochs=3, batch_size=32 // processes, strategy=strategy, run_dir=directory, **options, **quiet
    )
    task = page["Digits"]()
    with contextlib.redirect_stdout(None):
        plan = trainer.plan(task, page["train"])
    result = trainer.fit(task, page["train"])
    held = sum(plan.memory[part] or 0 for part in ("parameters", "gradients", "optimizer"))
    if rank() == 0:
        print(held, result.progress.steps)


def main() -> None:
    """Print a row for each strategy."""
    with tempfile.TemporaryDirectory() as root:
        for strategy, processes in RUNS:
            name = f"{strategy}-{processes}"
            command = [sys.executable, __file__, strategy, str(processes), f"{root}/{name}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            held, steps = done.stdout.splitlines()[-1].split()
            assert steps == "135", f"{name} made {steps} steps"
            alone, found = (load_file(f"{root}/{each}/model.safetensors") for each in ("cpu-1", name))
            apart = max((found[key] - alone[key]).abs().max().item() for key in alone)
            largest = max(alone[key].abs().max().item() for key in alone)
            print(f'| `"{strategy}"` | {processes} | {apart / largest:.0e} | {int(held) / 1000:.0f} kB |')


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 1 else main()
