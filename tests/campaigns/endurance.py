"""Whether long runs, and many runs in one process, leave anything behind: memory, threads, files, objects.

Run as `python -m tests.campaigns.endurance --updates 5000`; see `--help`. It ends with exit code 1 if
something grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import shared_cache
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.callbacks import Callback, EarlyStopping, Throughput
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.task import TaskModule
from drivetrain.trainer.trainer import Trainer

UPDATES, FITS = 5000, 20

ALLOWED = 0.01
"""By how much anything may have grown at the end, of what it was when all had been done once."""

_SAMPLES = 50
"""How often a run is looked at."""

_SETTLED = 0.2
"""The part of a run after which everything has been done once, and caches are full."""

_BLOCKS = 100_000
"""What the growth of blocks is measured by, fewer than any program has: caches of Python's own still take
some hundreds after much has been done."""

_ENDING = 2.0
"""Seconds that a thread may take to end."""

_BATCH, _ROWS = 8, 400


_before: ContextVar[int] = ContextVar("before", default=0)
"""Python's blocks of memory when the counting began."""


class Measure(NamedTuple):
    """What a process has at a moment.

    Attributes:
        memory: Bytes of it that are in the machine's memory.
        threads: Threads.
        descriptors: Open files, sockets and pipes; 0 where the system does not tell.
        children: Processes that it has started.
        objects: Python objects that the garbage collector knows, without those that were there before (see
            `apart`).
        tensors: Those of them that are tensors.
        blocks: Blocks of memory of Python's own, which numbers, texts and mappings of such take too; without
            those that were there before.
    """

    memory: int
    threads: int
    descriptors: int
    children: int
    objects: int
    tensors: int
    blocks: int


def measure() -> Measure:
    """Look at this process, once its garbage is collected."""
    # torch does so by itself once they are 128.
    shared_cache.free_dead_references()  # type: ignore[no-untyped-call]
    gc.collect()
    blocks = sys.getallocatedblocks() - _before.get()
    kinds = [type(each) for each in gc.get_objects()]
    tensors = sum(issubclass(each, Tensor) for each in kinds)
    count = sum(each is not Measure for each in kinds)
    return Measure(_memory(), _threads(), _entries("/proc/self/fd"), _children(), count, tensors, blocks)


@contextmanager
def apart() -> Iterator[None]:
    """Within it what is there now is not counted: torch's modules alone are 300,000 objects, beside which
    what is left behind would not be seen.
    """
    gc.collect()
    gc.freeze()
    token = _before.set(sys.getallocatedblocks())
    try:
        yield
    finally:
        _before.reset(token)
        gc.unfreeze()


def _memory() -> int:
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _threads() -> int:
    return max(_entries("/proc/self/task"), threading.active_count())


def _entries(directory: str) -> int:
    with suppress(OSError):
        return len(os.listdir(directory))
    return 0


def _children() -> int:
    with suppress(OSError):
        return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split())
    return 0


@dataclass
class Course:
    """What was measured, one after the other.

    Attributes:
        what: Of what.
        measures: In their order.
    """

    what: str
    measures: list[Measure]

    def growth(self) -> dict[str, float]:
        """By how much each has grown, relative to what it was: medians of a fifth after the first, and of the
        last.
        """
        count = len(self.measures)
        part = max(1, round(count * _SETTLED))
        first, last = self.measures[part : 2 * part], self.measures[-part:]
        found = {}
        for name in Measure._fields:
            before, after = (
                statistics.median(getattr(each, name) for each in some) for some in (first, last)
            )
            found[name] = (after - before) / max(before, _BLOCKS if name == "blocks" else 1)
        return found

    @property
    def grown(self) -> list[str]:
        """What has grown by more than is allowed."""
        return [name for name, by in self.growth().items() if by > ALLOWED]

    def __str__(self) -> str:
        """A table."""
        growth = self.growth()
        part = max(1, round(len(self.measures) * _SETTLED))
        lines = [f"{self.what:<32}{'first':>14}{'settled':>14}{'last':>14}{'growth':>10}"]
        for name, by in growth.items():
            values = [getattr(self.measures[index], name) for index in (0, part, -1)]
            shown = [f"{each / 2**20:.1f} MiB" if name == "memory" else f"{each}" for each in values]
            lines.append(f"  {name:<30}" + "".join(f"{each:>14}" for each in shown) + f"{by:>+10.2%}")
        return "\n".join(lines)


class Watch(Callback):
    """Measures every so many updates.

    Args:
        every: How many; a multiple of the log interval, within which values pile up.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.measures: list[Measure] = []

    def on_save(self, run: Any) -> None:
        """Measure, where it is time."""
        if run.progress.updates % self.every == 0:
            self.measures.append(measure())


class Mean:
    """A declared metric: the mean of the errors."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add a batch."""
        self.sums += torch.tensor([(outputs - target).abs().sum().item(), len(target)])

    def compute(self) -> Tensor:
        """The mean."""
        return self.sums[0] / self.sums[1]

    def reset(self) -> None:
        """Begin anew."""
        self.sums.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The sums."""
        return {"sums": self.sums.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take them over."""
        self.sums.copy_(state["sums"])


class Small(TaskModule):
    """Learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """A number for each row."""
        found: Tensor = self.net(x).squeeze(1)
        return found

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        """The squared error, and its root to be logged."""
        loss = F.mse_loss(outputs, batch[1])
        return {"loss": loss, "root": loss.detach().sqrt()}

    def metrics(self) -> dict[str, Any]:
        """The mean error."""
        return {"error": Mean()}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> Any:
        """The data's batches are pairs."""
        return outputs, batch[1]

    def configure_optimizers(self) -> OptimizerConfig:
        """AdamW."""
        return OptimizerConfig("adamw", lr=1e-3, schedule="cosine")


def loader(workers: int = 0) -> DataLoader[Any]:
    """Shuffled rows and their sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1)), batch_size=_BATCH, shuffle=True, num_workers=workers)


def _trainer(
    directory: Path, updates: int, every: int, asynchronous: bool, *callbacks: Any, bar: bool = True
) -> Trainer:
    return Trainer(
        max_steps=updates,
        strategy="cpu",
        log_every=f"{max(1, every // 10)} steps",
        validate_every=f"{every} steps",
        checkpoint=CheckpointConfig(every=f"{every} steps", asynchronous=asynchronous),
        loggers=("tensorboard", "csv", "jsonl"),
        callbacks=[Throughput(), EarlyStopping("validation/loss", patience=10**6), *callbacks],
        max_grad_norm=1.0,
        progress_bar=bar,
        run_dir=directory,
    )


def long_run(directory: Path, updates: int = UPDATES, workers: int = 0, asynchronous: bool = False) -> Course:
    """One run with logging, validation and checkpoints.

    Args:
        directory: For its files.
        updates: How many; it is looked at, validates and saves a fiftieth of them apart.
        workers: Worker processes of its data.
        asynchronous: Whether it saves in the background.
    """
    every = max(1, updates // _SAMPLES)
    watch = Watch(every)
    trainer = _trainer(directory / "run", updates, every, asynchronous, watch)
    _fit_once(directory / "before", workers, asynchronous)
    with apart():
        trainer.fit(Small(), loader(workers), loader())
    return Course(f"{updates} updates", watch.measures)


def many_fits(directory: Path, fits: int = FITS, workers: int = 0, asynchronous: bool = False) -> Course:
    """One fit after the other in one process, each with all that a long one does.

    Args:
        directory: For their files.
        fits: How many.
        workers: Worker processes of their data.
        asynchronous: Whether they save in the background.
    """
    measures, threads = [], _threads()
    _fit_once(directory / "before", workers, asynchronous)
    with apart():
        for number in range(fits):
            _fit_once(directory / str(number), workers, asynchronous)
            _let_threads_end(threads)
            measures.append(measure())
    return Course(f"{fits} fits", measures)


def _let_threads_end(count: int) -> None:
    """Wait for threads that are over for Python, and not yet for the system."""
    deadline = time.monotonic() + _ENDING
    while _threads() > count and time.monotonic() < deadline:
        time.sleep(0.01)


def _fit_once(directory: Path, workers: int, asynchronous: bool) -> None:
    trainer = _trainer(directory, 100, 20, asynchronous)
    trainer.fit(Small(), loader(workers), loader())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    bad = False
    with tempfile.TemporaryDirectory() as directory:
        for name, number, act in (("long", options.updates, long_run), ("fits", options.fits, many_fits)):
            if not number:
                continue
            course = act(Path(directory) / name, number, options.workers, options.asynchronous)
            verdict = f"grown: {', '.join(course.grown)}" if course.grown else f"flat within {ALLOWED:.0%}"
            sys.stdout.write(f"\n{course}\n{verdict}\n")
            bad = bad or bool(course.grown)
    return int(bad)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.endurance",
        description="Train for long, and often, and see that nothing grows.",
    )
    add = parser.add_argument
    add("--updates", type=int, default=UPDATES, help="of one long run; 0 for none (default: %(default)s)")
    add("--fits", type=int, default=FITS, help="one after the other; 0 for none (default: %(default)s)")
    add("--workers", type=int, default=0, help="worker processes of the data (default: %(default)s)")
    add("--asynchronous", action="store_true", help="save in the background")
    return parser


if __name__ == "__main__":
    sys.exit(main())
