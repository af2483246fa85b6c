"""One turn of a benchmark: train a task in this process until enough of its steps are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks import EarlyStopping, MemoryReport
from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import DataError, StrategyError
from drivetrain.run.messages import part_of
from drivetrain.strategies.transforms.compile import as_compile
from drivetrain.task.task import TaskModule
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from drivetrain.run.run import Run

BLOCKS = 20
_WARM_UP = 4
"""The fewest steps between the first and those that are timed."""

LENGTH: dict[str, Any] = {
    **dict.fromkeys(("max_epochs", "max_time", "max_tokens", "min_steps", "dry_run")),
    "max_steps": 10**9,
}
"""The Trainer's arguments that the clock replaces, which ends the fit."""

_OFF: dict[str, Any] = {
    **dict.fromkeys(("validate_every", "validate_from", "sanity_validation")),
    **dict.fromkeys(("checkpoint", "progress_bar"), False),
    **dict.fromkeys(("loggers", "assets"), ()),
}
"""The Trainer's arguments that are off unless they are what is compared."""


class BlockClock:
    """Times the first step, a warm-up, then twenty blocks of steps. The fastest block counts.

    It waits for the device only where a block begins or ends. A machine's other work only ever adds time, so
    the fastest block repeats best.

    Attributes:
        first: Seconds from the making of the clock to the end of the first step.
        size: The steps of a block; 0 during the warm-up.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.first = self.fastest = float("inf")
        self.steps = self.size = self.blocks = 0
        self.wait: Callable[[], object] = lambda: None
        self._warm, self._mark, self._marked, self._next = 0.0, perf_counter(), 0, 1

    def step(self) -> bool:
        """Count a step; return whether all blocks are complete."""
        self.steps += 1
        if self.steps < self._next:
            return False
        self.wait()
        now = perf_counter()
        spent, made = now - self._mark, self.steps - self._marked
        self._mark, self._marked = now, self.steps
        if self.steps == 1:
            self.first = spent
            self._next += _WARM_UP
        elif self.size:
            self.fastest = min(self.fastest, spent / made)
            self.blocks += 1
            self._next += made
        else:
            self._warm += spent
            if self._warm >= self.seconds / 4:
                self.size = max(1, round(self.seconds / BLOCKS * made / spent))
            self._next += self.size or 2 * made
        return self.blocks == BLOCKS


class Probe(Callback):
    """Keeps what a fit is made of, and ends it when its clock has timed enough steps."""

    changes_data = False

    def __init__(self, clock: BlockClock) -> None:
        self.clock = clock
        self.engine: Any = None
        self.threads = 1
        self.memory: int | None = None  # as an allocator counts it

    def on_fit_start(self, run: Run) -> None:
        """Keep the engine, and reset the allocator's account."""
        self.engine, self.threads = run.engine, torch.get_num_threads()
        kind = run.engine.device.type
        if kind == "xla":
            raise StrategyError("a benchmark times no steps on XLA: it cannot tell when one has ended")
        self.clock.wait = getattr(torch, kind).synchronize
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats(run.engine.device)

    def on_step_end(self, run: Run) -> None:
        """Count the step; the first rank's clock decides for all."""
        if run.is_main and self.clock.step():
            run.stop("the benchmark's steps are made")

    def on_fit_end(self, run: Run) -> None:
        """Read the allocator's account."""
        if run.engine.device.type == "cuda":
            self.memory = torch.cuda.max_memory_allocated(run.engine.device)


def watched(trainer: Trainer, probe: Probe, folder: str, compared: Iterable[str] = ()) -> Trainer:
    """Return a Trainer whose fit is watched, and writes into a folder; it saves and logs only if that is
    compared.
    """
    strategy = trainer.select_strategy()
    watches = [*(each for each in trainer.callbacks if not isinstance(each, EarlyStopping)), probe]
    if as_compile(trainer.compile) is None and strategy.device.type == "cpu" and strategy.name != "deepspeed":
        watches.append(MemoryReport(show=False))  # the second step, which is in the warm-up
    settings = {name: value for name, value in _OFF.items() if name not in compared} | LENGTH
    return dataclasses.replace(trainer, **settings, run_dir=f"{folder}/run", callbacks=watches)


def turn(
    trainer: Trainer, task: TaskModule, data: Any, compared: Iterable[str], clock: BlockClock, folder: str
) -> dict[str, Any]:
    """Train until the clock has timed enough steps, and return what `_measured` returns."""
    probe = Probe(clock)
    trainer = watched(trainer, probe, folder, compared)
    with part_of("the benchmark begins anew", is_probe=True):
        result = trainer.fit(task, data)
    if not clock.blocks:
        raise DataError(
            f"the fit ended after {result.progress.steps} steps ({result.stop_reason}), before enough of them"
            " were timed. Give more data, or fewer seconds"
        )
    return _measured(trainer, probe)


def _measured(trainer: Trainer, probe: Probe) -> dict[str, Any]:
    """Return the values of a fit that has ended, by the names of `BenchmarkRow`.

    "notes" says why a value is missing.
    """
    engine, seconds, notes = probe.engine, probe.clock.fastest, {}
    found = {
        "step_seconds": seconds,
        "samples_per_second": engine.progress.samples / engine.progress.steps / seconds,
        "first_step_seconds": probe.clock.first,
        "processes": engine.strategy.world_size,
        "threads": probe.threads,
        "device": str(engine.device),
    }
    if engine.progress.tokens:
        found["tokens_per_second"] = engine.progress.tokens / engine.progress.steps / seconds
    uses = [each.use for each in trainer.callbacks if isinstance(each, MemoryReport) and each.use is not None]
    memory = uses[-1].total if uses else probe.memory
    if memory is not None:
        found["peak_memory"] = memory
    else:
        compiled = "of a compiled task " if as_compile(trainer.compile) else ""
        notes["peak_memory"] = f"the memory {compiled}on {engine.device.type!r} cannot be observed"
    return {**found, "notes": notes}
