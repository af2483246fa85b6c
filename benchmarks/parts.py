"""Where the time of a step goes: the hand-written loop's and ours, part by part.

The functions of either loop are replaced by ones that read a clock and charge what has passed to the
innermost part that is open, so that parts are disjoint and sum up to the whole. What such a function itself
costs is measured on an empty one and taken off.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from drivetrain.core.random_streams import Streams
from drivetrain.data.feed import Feed
from drivetrain.engine import engine
from drivetrain.engine.engine import Engine
from drivetrain.strategies.single import SingleDevice
from drivetrain.task.task import TaskModule
from peers import HAND, OURS, Peer, load
from peers.hand import Hand
from report import Cell, Table
from rows import Row
from turns import silenced, turn
from workloads import Clock, Job, Tiny

TITLE = "Where the time of a step goes"

WINDOW = "the next batch, counted, in its window"
SEED = "seeding torch's generator"
STEP = "from our step to the task's: the batch's columns, the result"
MODEL = "the model, the loss, metrics"
READ = "taking apart what was returned"
BACKWARD = "backward"
OPTIMIZER = "the optimizer's step"
ZERO = "gradients to None"
UPDATE = "the rest of the step: shares, counts, its result; gradients to None"
LOOP = "the loop: clocks, hooks, what is due, rows for the log"

PARTS = (WINDOW, SEED, STEP, MODEL, READ, BACKWARD, OPTIMIZER, ZERO, UPDATE, LOOP)
"""In the order of a step."""


class Parts:
    """Charges time to the innermost part that is open; at first that is the loop.

    Also a job's clock: it hears of each loss, and so knows where the blocks of steps begin.

    Args:
        warm_up: Losses before the first block.
        block: Losses of a block.
        around: Seconds that a timed function's clocks add to the part around it.
        own: Those that they add to its own.

    Attributes:
        spent: Seconds of each part in this block.
        blocks: The same of each whole block after the warm-up.
    """

    def __init__(self, warm_up: int, block: int, around: float = 0.0, own: float = 0.0) -> None:
        self.blocks: list[dict[str, float]] = []
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._prices = around, own
        self._open = [LOOP]
        self._losses = -warm_up
        self._block = block
        self._last = Clock.read()

    def __call__(self) -> None:
        """A loss was computed."""
        if self._losses >= 0 and self._losses % self._block == 0:
            if self._losses:
                self.blocks.append(self.spent)
            self.spent = dict.fromkeys(PARTS, 0.0)
        self._losses += 1

    def resume(self) -> None:
        """Forget the time since the last part ended."""
        self._last = Clock.read()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a part."""
        read, stack = Clock.read, self._open
        around, own = self._prices

        def call(*args: Any, **kwargs: Any) -> Any:
            self.spent[stack[-1]] += read() - self._last - around
            stack.append(part)
            self._last = read()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += read() - self._last - own
                stack.pop()
                self._last = read()

        return call


class _Timed:
    """An iterator whose steps are a part."""

    def __init__(self, part: Callable[[], Any]) -> None:
        self._next = part

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next()

    def close(self) -> None:
        """What a generator has."""


def _of_both(parts: Parts) -> Iterator[Any]:
    """What the task does."""
    yield patch.object(Tiny, "__call__", parts.timed(MODEL, Tiny.__call__))
    yield patch.object(Job, "loss", parts.timed(MODEL, Job.loss))
    yield patch.object(Job, "scalars", parts.timed(MODEL, Job.scalars))


def _of_hand(job: Job, parts: Parts) -> Iterator[Any]:
    """The hand-written loop's parts."""
    job.data = _Timed(parts.timed(WINDOW, iter(job.data).__next__))
    make = job.optimizer

    def optimizer(parameters: Any) -> Any:
        made: Any = make(parameters)
        made.step = parts.timed(OPTIMIZER, made.step)
        made.zero_grad = parts.timed(ZERO, made.zero_grad)
        return made

    yield patch.object(job, "optimizer", optimizer)
    yield patch.object(Tensor, "backward", parts.timed(BACKWARD, Tensor.backward))


def _of_ours(parts: Parts) -> Iterator[Any]:
    """The parts of our step."""
    windows: Any = Feed.windows

    def timed(*args: Any) -> _Timed:
        return _Timed(parts.timed(WINDOW, windows(*args).__next__))

    yield patch.object(Feed, "windows", timed)
    yield patch.object(engine, "read_output", parts.timed(READ, engine.read_output))
    for owner, name, part in (
        (Streams, "seed_step", SEED),
        (TaskModule, "training_step", STEP),
        (SingleDevice, "backward", BACKWARD),
        (SingleDevice, "optimizer_step", OPTIMIZER),
        (Engine, "train_step", UPDATE),
    ):
        yield patch.object(owner, name, parts.timed(part, getattr(owner, name)))


def _prices() -> tuple[float, float]:
    """Seconds that the clocks of a timed function add to the part around it, and to its own."""
    best = []
    for _ in range(50):
        parts, count = Parts(0, 1), 1000
        timed = parts.timed(MODEL, _nothing)
        start = Clock.read()
        for _ in range(count):
            pass
        between = Clock.read()
        for _ in range(count):
            _nothing()
        end = Clock.read()
        parts.resume()
        for _ in range(count):
            timed()
        around, own = parts.spent[LOOP] - (between - start), parts.spent[MODEL] - (end - between)
        best.append((around / count, own / count))
    return min(each for each, _ in best), min(each for _, each in best)


def _nothing() -> None:
    pass


def measure(row: Row, peer: Peer, steps: int) -> dict[str, float]:
    """Seconds of each part of a step, in the block of steps whose sum is the lowest."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory, silenced():
        job = row.job(steps, Path(directory))
        parts = Parts(job.warm_up, job.block, *_prices())
        job.clock = parts
        patches = _of_hand(job, parts) if isinstance(peer, Hand) else _of_ours(parts)
        with ExitStack() as stack:
            for each in chain(_of_both(parts), patches):
                stack.enter_context(each)
            peer.train(job)
    fastest = min(parts.blocks, key=lambda block: sum(block.values()))
    return {part: seconds / job.block for part, seconds in fastest.items()}


def table(row: Row, rounds: int, steps: int) -> Table:
    """The parts of the hand-written loop and of ours, in turns; the medians of some rounds."""
    peers = {name: load(name) for name in (HAND, OURS)}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    whole: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, peer in peers.items():
            gc.collect()
            parts[name].append(measure(row, peer, steps))
            whole[name].append(turn(peer, row, steps).seconds)
    made = Table(
        TITLE,
        f"Microseconds of a step, {row.name}: each part without the parts within it; medians of {rounds}"
        " rounds.",
        "",
        [HAND, OURS, "more"],
    )
    for part in PARTS:
        made.rows.append((part, _cells(*([each[part] for each in parts[name]] for name in peers))))
    sums = ([sum(each.values()) for each in parts[name]] for name in peers)
    made.rows.append(("all parts", _cells(*sums)))
    made.rows.append(("a step without clocks in it", _cells(whole[HAND], whole[OURS])))
    return made


def _cells(hand: list[float], ours: list[float]) -> list[Cell]:
    first, second = (1e6 * statistics.median(each) for each in (hand, ours))
    return [
        Cell(f"{first:.1f}", round(first, 2)),
        Cell(f"{second:.1f}", round(second, 2)),
        Cell(f"{second - first:+.1f}", round(second - first, 2)),
    ]
