"""Whether long runs, and many runs in one process, leave anything behind: memory, threads, files, objects."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support.tasks import Regression, pairs
from torch import Tensor
from torch.multiprocessing.reductions import shared_cache
from torchmetrics import MeanAbsoluteError

from drivetrain import Callback, CheckpointConfig, EarlyStopping, OptimizerConfig, Throughput, Trainer

STEPS, FITS = 5000, 20
ALLOWED = 0.01  # the relative growth that is allowed, from when all has been done once; memory may double
_SAMPLES = 50  # how often a run is looked at
_BLOCKS = 100_000  # what the growth of blocks is relative to, as Python's own caches take some hundreds late
_blocks_before = [0]


class Measure(NamedTuple):  # of a process; objects, tensors and blocks since `apart` began
    memory: int
    threads: int
    descriptors: int
    children: int
    objects: int
    tensors: int
    blocks: int


def measure() -> Measure:  # look at this process, once its garbage is collected
    shared_cache.free_dead_references()  # type: ignore[no-untyped-call]  # torch does so once they are 128
    gc.collect()
    blocks = sys.getallocatedblocks() - _blocks_before[0]
    kinds = [type(each) for each in gc.get_objects()]
    tensors = sum(issubclass(each, Tensor) for each in kinds)
    memory, children = 0, 0
    with suppress(OSError):
        memory = int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = len(Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split())
    count = sum(each is not Measure for each in kinds)
    return Measure(memory, _threads(), _entries("/proc/self/fd"), children, count, tensors, blocks)


@contextmanager
def apart() -> Iterator[None]:  # count nothing that is there now, beside which the rest would not be seen
    gc.collect()
    gc.freeze()
    _blocks_before[0] = sys.getallocatedblocks()
    try:
        yield
    finally:
        _blocks_before[0] = 0
        gc.unfreeze()


def _threads() -> int:
    return max(_entries("/proc/self/task"), threading.active_count())


def _entries(directory: str) -> int:
    with suppress(OSError):
        return len(os.listdir(directory))
    return 0


@dataclass
class Course:  # what was measured, one after the other
    what: str
    measures: list[Measure]

    def growth(self) -> dict[str, float]:  # from the fifth after the first, once all was done, to the last
        part = max(1, round(len(self.measures) * 0.2))
        found = {}
        for name in Measure._fields:
            values = [getattr(each, name) for each in self.measures]
            before, after = statistics.median(values[part : 2 * part]), statistics.median(values[-part:])
            found[name] = (after - before) / max(before, _BLOCKS if name == "blocks" else 1)
        return found

    @property
    def grown(self) -> list[str]:  # what has grown by more than is allowed
        return [name for name, by in self.growth().items() if by > (1.0 if name == "memory" else ALLOWED)]

    def __str__(self) -> str:
        part = max(1, round(len(self.measures) * 0.2))
        lines = [f"{self.what:<16}{'first':>14}{'settled':>14}{'last':>14}{'growth':>10}"]
        for name, by in self.growth().items():
            values = [getattr(self.measures[index], name) for index in (0, part, -1)]
            lines.append(f"  {name:<14}" + "".join(f"{each:>14}" for each in values) + f"{by:>+10.2%}")
        return "\n".join(lines)


class Watch(Callback):  # every so many steps, a multiple of the log interval: values pile up
    def __init__(self, every: int) -> None:
        self.every = every
        self.measures: list[Measure] = []

    def on_save(self, run: Any) -> None:
        if run.progress.steps % self.every == 0:
            self.measures.append(measure())


class Measured(Regression):
    def metrics(self) -> dict[str, Any]:
        return {"error": MeanAbsoluteError()}


def _fit(folder: Path, steps: int, every: int, workers: int, asynchronous: bool, *callbacks: Any) -> None:
    trainer = Trainer(
        max_steps=steps,
        strategy="cpu",
        log_every=f"{max(1, every // 10)} steps",
        validate_every=f"{every} steps",
        checkpoint=CheckpointConfig(every=f"{every} steps", asynchronous=asynchronous),
        loggers=("tensorboard", "csv", "jsonl"),
        callbacks=[Throughput(), EarlyStopping("validation/loss", patience=10**6), *callbacks],
        max_grad_norm=1.0,
        run_dir=folder,
    )
    task = Measured(OptimizerConfig("adamw", lr=1e-3, schedule="cosine"), dropout=0.1)
    trainer.fit(task, pairs(400, 8, shuffle=True, num_workers=workers), pairs(400, 8))


def long_run(directory: Path, steps: int = STEPS, workers: int = 0, asynchronous: bool = False) -> Course:
    every = max(1, steps // _SAMPLES)
    watch = Watch(every)
    _fit(directory / "before", 100, 20, workers, asynchronous)
    with apart():
        _fit(directory / "run", steps, every, workers, asynchronous, watch)
    return Course(f"{steps} steps", watch.measures)


def many_fits(directory: Path, fits: int = FITS, workers: int = 0, asynchronous: bool = False) -> Course:
    """One fit after the other in one process, each with all that a long one does."""
    measures, threads = [], _threads()
    _fit(directory / "before", 100, 20, workers, asynchronous)
    with apart():
        for number in range(fits):
            _fit(directory / str(number), 100, 20, workers, asynchronous)
            deadline = time.monotonic() + 60  # some threads are over for Python, and not yet for the system
            while _threads() > threads and time.monotonic() < deadline:
                time.sleep(0.01)
            measures.append(measure())
    return Course(f"{fits} fits", measures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train for long, and often, and see that nothing grows.")
    parser.add_argument("--steps", type=int, default=STEPS, help="of one long run; 0 for none")
    parser.add_argument("--fits", type=int, default=FITS, help="one after the other; 0 for none")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of the data")
    parser.add_argument("--asynchronous", action="store_true", help="save in the background")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bad = False
    with tempfile.TemporaryDirectory() as directory:
        for number, act in ((options.steps, long_run), (options.fits, many_fits)):
            if number:
                course = act(Path(directory) / act.__name__, number, options.workers, options.asynchronous)
                sys.stdout.write(f"\n{course}\ngrown: {', '.join(course.grown) or 'nothing'}\n")
                bad = bad or bool(course.grown)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
