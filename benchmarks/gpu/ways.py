"""Ways to train, and turns of them on one device."""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drivetrain import CompileConfig
from drivetrain.callbacks.statistics.peaks import peak_flops
from gpu.journal import Journal
from gpu.works import Amount, Size
from peers import HAND, OURS, load
from peers.ours import Task, trainer
from turns import silenced
from workloads import Clock, Job, Work

PACKAGES = {"Lightning": "lightning", "Accelerate": "accelerate", "transformers Trainer": "transformers"}
"""What other libraries' contestants need; none of it is installed by us."""


@dataclass(frozen=True)
class Way:
    """A contestant, with what it is told to do.

    Attributes:
        name: In the tables.
        peer: Of the roster.
        compiled: "" for not at all, "whole", or "blocks" for each block by itself.
        beside: The way that it is measured against.
        options: Of our Trainer.
        benchmark: Whether cuDNN tries its algorithms first.
    """

    name: str
    peer: str = OURS
    compiled: str = ""
    beside: str = HAND
    options: Mapping[str, Any] = field(default_factory=dict)
    benchmark: bool = False

    @property
    def lacks(self) -> str:
        """The package that it needs and that is not there."""
        package = PACKAGES.get(self.peer, "")
        return package if package and importlib.util.find_spec(package) is None else ""

    def train(self, job: Job) -> None:
        """Train."""
        job.compiled = bool(self.compiled)
        if self.peer == OURS:
            if self.compiled:
                whole: dict[str, Any] = (
                    {"scope": "task", "dynamic": False} if self.compiled == "whole" else {}
                )
                job.compiled = CompileConfig(**whole, backend=job.backend)
            trainer(job, **self.options).fit(Task(job), job.data)
            return
        if self.compiled == "blocks":
            job.compiled = False
            blocks: Any = job.net.blocks
            for block in blocks:
                block.compile(backend=job.backend)
        load(self.peer).train(job)


BARE = (Way(HAND, HAND), Way(OURS))
"""Without compilation."""

OTHERS = tuple(Way(name, name) for name in PACKAGES)

_BLOCKS = f"{HAND}, by block"
GPT_WAYS = (
    Way(HAND, HAND, "whole"),
    Way(OURS, OURS, "blocks", beside=_BLOCKS),
    Way(_BLOCKS, HAND, "blocks", beside=_BLOCKS),
    Way(f"{OURS}, whole", OURS, "whole"),
    *(Way(name, name, "whole") for name in PACKAGES),
)
"""Ours by default compiles by block, and so it stands beside a hand-written loop that does."""


class SynchronisedClock(Clock):
    """Waits for the device before it notes the time, where a block begins or ends, and only there.

    Args:
        first: Losses before the first block.
        block: Losses of a block.
        wait: Waits for the device.
    """

    def __init__(self, first: int, block: int, wait: Callable[[], None]) -> None:
        super().__init__()
        self.first = first
        self.block = block
        self.wait = wait

    def __call__(self) -> None:
        """Note the time."""
        number = len(self.times) - self.first
        if number >= 0 and number % self.block == 0:
            self.wait()
        super().__call__()


def waits_for(device: str) -> Callable[[], None]:
    """Return what waits for a device's work."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


@contextmanager
def prepared(work: Work, amount: Amount, size: Size, device: str, precision: str) -> Iterator[Job]:
    """Free what the job before has used, and give one whose model is on the device."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        k = amount.accumulation
        job = Job(
            work, amount.steps, amount.block, amount.warm_up, k, device=device, precision=precision,
            backend=size.backend, directory=Path(directory),
            clock=SynchronisedClock(amount.warm_up * k, amount.block * k, waits_for(device)),
        )  # fmt: skip
        job.net.to(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        benchmark = torch.backends.cudnn.benchmark
        try:
            yield job
        finally:
            torch.backends.cudnn.benchmark = benchmark


def memory(device: str) -> dict[str, int | None]:
    """Return the most bytes since the job was made: of tensors, and held by torch's allocator."""
    if device != "cuda":
        return {"allocated": None, "reserved": None}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def probed(job: Job) -> float:
    """Return the loss of one sample; nothing is compiled for it."""
    with torch.compiler.set_stance("force_eager"):
        return job.probed(1)


def turn(way: Way, work: Work, amount: Amount, size: Size, device: str, precision: str) -> dict[str, Any]:
    """Train once.

    Returns:
        Seconds of a step in each block, seconds to the end of the first step (compilation is in it), the
        loss before and after, and the peak of the memory.
    """
    with prepared(work, amount, size, device, precision) as job:
        torch.backends.cudnn.benchmark = way.benchmark
        before = probed(job)
        clock: Any = job.clock
        with silenced():
            load(way.peer)  # its imports are in nobody's time
            begun = time.perf_counter()
            way.train(job)
        first = clock.times[amount.accumulation] - begun
        used = memory(device)
        return {
            "seconds": job.blocks(clock.times),
            "first_step": first,
            "loss": [before, probed(job)],
            **used,
        }


def take_turns(
    journal: Journal,
    ways: tuple[Way, ...],
    work: Work,
    amount: Amount,
    size: Size,
    device: str,
    *,
    precision: str = "bf16",
    rounds: tuple[int, ...] = (0,),
    flops: int | None = None,
    unit: str = "samples",
    units: int = 1,
) -> None:
    """Let each way train once in each round, in another order each time; each turn is a row.

    A later round has ours and the hand-written loop alone: the time is theirs. Whatever would not end before
    the part's limit is left out.

    Args:
        journal: Where rows go.
        ways: The contestants, the references first.
        work: What is trained.
        amount: For how long.
        size: What compiles.
        device: Where.
        precision: "32" or "bf16".
        rounds: Their numbers.
        flops: Operations of a sample.
        unit: What a rate counts.
        units: How many of it are in a sample.
    """
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if device == "cuda" else None
    for round_ in rounds:
        able = [way for way in ways if not round_ or way.peer in (HAND, OURS)]
        for way in random.Random(round_).sample(able, len(able)) if round_ else able:
            if way.lacks:
                journal.write("left out", work=work.name, contestant=way.name, why=f"no {way.lacks} here")
                continue
            what = f"{work.name}, {amount.accumulation} micro-batches: {way.name}"
            if journal.left() < journal.longest.get(what, 3.0):
                journal.write("left out", work=work.name, contestant=way.name, why="no time was left")
                continue
            begun = time.monotonic()
            with journal.attempt(what, way.peer in (HAND, OURS)):
                found = turn(way, work, amount, size, device, precision)
                samples = work.rows * amount.accumulation
                journal.write(
                    "turn",
                    work=work.name,
                    micro_batches=amount.accumulation,
                    contestant=way.name,
                    beside=way.beside,
                    round=round_,
                    unit=unit,
                    units=samples * units,
                    flops=None if flops is None else samples * flops,
                    peak_flops=peak,
                    **found,
                )
            journal.longest[what] = time.monotonic() - begun
