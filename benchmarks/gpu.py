"""GPT-2 of 124M parameters on one GPU: tokens per second and model FLOPs utilisation.

bf16 and compiled, 16 windows of 1,024 tokens, fused AdamW; a hand-written loop and the others in turns. The
utilisation counts 6 FLOPs for a parameter and token, and 12 x layers x width x length for the attention's
scores (Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", JMLR 2023, appendix B), over the
dense bf16 peak of the GPU's data sheet. Our loop is then run once more under
`torch.cuda.set_sync_debug_mode("error")` between log points, where nothing may wait for the device.

`make bench` runs this with all contestants. By itself, `python benchmarks/gpu.py --output FILE` compares ours
with the hand-written loop, writes both as JSON and takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain import Callback, Trainer
from peers import HAND, OURS, ROSTER, load
from peers.ours import Task
from report import NONE, Cell, Table
from turns import silenced
from workloads import GPT, Clock, Job, Work, tokens

TITLE = "GPT-2 on a GPU"
ROW = "GPT-2 124M, bf16, compiled"
GOAL = 1.01

PEAKS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70, "4090": 165}
"""Dense bf16 TFLOPS by what is in the device's name; NVIDIA's data sheets, the SXM forms."""

_LENGTH = 1024
_TOKENS = 50_304


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT.

    Attributes:
        layers: Blocks.
        width: Of the residual stream.
        heads: Of a block.
        size: Of the vocabulary.
        length: Tokens of a window.
        rows: Windows of a batch.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    size: int = _TOKENS
    length: int = _LENGTH
    rows: int = 16

    def work(self) -> Work:
        """The model and its data."""
        return Work(
            ROW,
            lambda: GPT(self.layers, self.width, self.heads, self.size, self.length, tied=True),
            lambda count, rows: tokens(count, rows, self.length, self.size),
            self.rows,
            "adamw",
            6e-4,
        )

    def flops(self, parameters: int) -> int:
        """Of a token, forward and backward. The tied embedding is the output's matrix, and counts once."""
        return 6 * parameters + 12 * self.layers * self.width * self.length


GPT2 = Shape()


class SynchronisedClock(Clock):
    """Waits for the device before it notes the time, where a block begins or ends, and only there."""

    def __init__(self, first: int, block: int, wait: Callable[[], None]) -> None:
        super().__init__()
        self.first = first
        self.block = block
        self.wait = wait

    def __call__(self) -> None:
        """Note the time."""
        update = len(self.times) - self.first
        if update >= 0 and update % self.block == 0:
            self.wait()
        super().__call__()


class NoWaiting(Callback):
    """From one log point to the next, whatever waits for the device is an error, the data's way there too.

    Args:
        every: Updates between log points.
        set_mode: `torch.cuda.set_sync_debug_mode`.
        warm_up: Updates that may wait: what they compile and look up is done once.
    """

    def __init__(self, every: int, set_mode: Callable[[str], Any], warm_up: int = 3) -> None:
        self.every = every
        self.set_mode = set_mode
        self.warm_up = warm_up
        self.watched = 0

    def on_step_start(self, run: Any) -> None:
        """Watch an update that neither warms up nor logs."""
        update = run.progress.updates + 1
        watched = update > self.warm_up and update % self.every != 0
        self.watched += watched
        self.set_mode("error" if watched else "default")


def job(shape: Shape, device: str, updates: int, block: int, directory: Path, compiled: bool = True) -> Job:
    """What each contestant is given."""
    warm_up = 5
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Job(
        shape.work(), updates, block, warm_up, device=device, precision="bf16", compiled=compiled,
        directory=directory, clock=SynchronisedClock(warm_up, block, wait),
    )  # fmt: skip


def seconds(name: str, shape: Shape, device: str, updates: int, block: int, compiled: bool = True) -> float:
    """Of a contestant's update.

    Raises:
        RuntimeError: Its model did not learn.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        made = job(shape, device, updates, block, Path(directory), compiled)
        before = made.probed()
        with silenced():
            load(name).train(made)
        after = made.probed()
    if not after < before:
        raise RuntimeError(f"{name}: the loss went from {before:.4g} to {after:.4g}; it did not train")
    return made.seconds()


def without_waiting(
    shape: Shape, device: str, updates: int, set_mode: Callable[[str], Any], compiled: bool = True
) -> int:
    """Run our loop with `NoWaiting`, logging every 10 updates.

    Returns:
        How many updates were watched.

    Raises:
        RuntimeError: torch's, from the operation that waited.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        made = job(shape, device, updates, updates, Path(directory), compiled)
        made.clock = Clock()
        watching = NoWaiting(10, set_mode)
        trainer = Trainer(
            max_epochs=1,
            strategy=device,
            precision="bf16-mixed",
            compile=compiled,
            checkpoint=False,
            log_every="10 steps",
            loggers=("csv",),
            progress_bar=False,
            run_dir=directory,
            callbacks=[watching],
        )
        try:
            with silenced():
                trainer.fit(Task(made), made.data)
        finally:
            set_mode("default")
    return watching.watched


def peak(name: str) -> float | None:
    """FLOPS of a GPU by its name, dense bf16; None for one that is not in the table."""
    return next((1e12 * tera for part, tera in PEAKS.items() if part in name), None)


def table(names: list[str], rounds: int, shape: Shape = GPT2) -> Table:
    """The figures, or a table that says that there is no GPU."""
    made = Table(
        TITLE,
        f"{ROW}: {shape.rows} windows of {shape.length} tokens; medians of {rounds} rounds.",
        "",
        ["tokens/s", "model FLOPs utilisation", "times the hand-written loop's", "goal for ours"],
    )
    if not torch.cuda.is_available():
        made.notes.append("Skipped: there is no GPU here.")
        return made
    able = [name for name in names if not ROSTER[name].apart and "cuda" not in load(name).lacks]
    spent: dict[str, list[float]] = {name: [] for name in able}
    for round_ in range(rounds):
        for name in random.Random(round_).sample(able, len(able)):
            spent[name].append(seconds(name, shape, "cuda", 40, 10))
    parameters = sum(each.numel() for each in shape.work().model().parameters())
    top = peak(torch.cuda.get_device_name())
    for name in able:
        ratio = statistics.median(a / b for a, b in zip(spent[name], spent[HAND], strict=True))
        rate = shape.rows * shape.length / statistics.median(spent[name])
        used = NONE if top is None else Cell(f"{rate * shape.flops(parameters) / top:.1%}")
        goal = f"{GOAL:g}" if name == OURS else ""
        made.rows.append((name, [Cell(f"{rate:,.0f}", rate), used, Cell(f"{ratio:.3f}", ratio), Cell(goal)]))
    watched = without_waiting(shape, "cuda", 40, torch.cuda.set_sync_debug_mode)
    made.notes.append(f"{watched} of our updates were run with every wait for the device an error: none was.")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure ours beside the hand-written loop, print the table and write it; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    made = table([HAND, OURS], options.rounds)
    sys.stdout.write(made.markdown())
    if options.output is not None:
        text = json.dumps({**made.data(), "markdown": made.markdown()}, indent=2)
        options.output.write_text(text, encoding="utf-8")
    return 0 if made.rows else 2


if __name__ == "__main__":
    sys.exit(main())
