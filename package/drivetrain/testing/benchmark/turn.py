"""One turn of a benchmark: train a task in this process until enough of its steps are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, nullcontext
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from drivetrain.callbacks import MemoryReport
from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import DataError, StrategyError
from drivetrain.data.batch import map_tensors
from drivetrain.data.reading import is_dataset
from drivetrain.data.split_source import AlreadySplit
from drivetrain.engine.updater import is_interleaved
from drivetrain.run.messages import part_of
from drivetrain.run.settings import RunSettings
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.transforms.compile import Compilation, as_compile
from drivetrain.task.model_info import info_of
from drivetrain.task.output import read_output
from drivetrain.task.task import TaskModule, overrides
from drivetrain.trainer.data_objects import begun, fit_data
from drivetrain.trainer.probe import unwatched, without_stopping
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from drivetrain.engine.engine import Engine
    from drivetrain.run.run import Run

BLOCKS = 20
_WARM_UP = 4
"""The fewest steps between the first and those that are timed."""

LENGTH: dict[str, Any] = {
    **dict.fromkeys(("max_epochs", "max_time", "min_epochs", "min_steps", "dry_run")),
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
    strategy, watches = trainer.select_strategy(), [*without_stopping(trainer.callbacks), probe]
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
    with part_of("the benchmark begins anew"):
        result = trainer.fit(unwatched(task), data)
    if not clock.blocks:
        raise DataError(
            f"the fit ended after {result.progress.steps} steps ({result.stop_reason}), before enough of them"
            " were timed. Give more data, or fewer seconds"
        )
    return _measured(trainer, task, data, probe)


def _measured(trainer: Trainer, task: TaskModule, data: Any, probe: Probe) -> dict[str, Any]:
    """Return the values of a fit that has ended, and of a hand-written loop, which follows now.

    Returns:
        Values by the names of `BenchmarkRow`; "notes" says why one is missing.
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
    if why := _obstacle(trainer, task, data, engine):
        notes["share_of_hand_written"] = f"no hand-written loop: {why}"
    else:
        found["hand_written_seconds"] = _by_hand(trainer, task, data, engine, probe.clock.seconds)
        found["share_of_hand_written"] = found["hand_written_seconds"] / seconds
    return {**found, "notes": notes}


# The hand-written loop.

_UNLIKE = (
    "memory",
    "micro_batch",
    "group_by_length",
    "limit_train_batches",
    "max_grad_value",
    "deterministic",
)
"""The Trainer's arguments that a loop of a few lines lacks."""


def _obstacle(settings: RunSettings, task: TaskModule, data: Any, engine: Engine) -> str:
    """Return why there is no hand-written loop to compare with; empty if there is one."""
    if not isinstance(engine.strategy, SingleDevice):
        return f"strategy {engine.strategy.name!r} wraps or shards the task"
    if len(engine.updaters) > 1 or is_interleaved(task) or overrides(task, "optimize"):
        return f"{type(task).__name__} has several optimizers, or makes its steps itself"
    if engine.precision.loss_scaling or engine.precision.name == "fp8":
        return f"precision {engine.precision.name!r} takes more than a context around the forward"
    defaults = {each.name: each.default for each in dataclasses.fields(settings)}
    unlike = [name for name in _UNLIKE if getattr(settings, name) != defaults[name]]
    stages = ("batch_size", "gradient_accumulation_steps")
    unlike += [name for name in stages if isinstance(getattr(settings, name), Mapping)]
    if unlike:
        return f"it would not have {unlike[0]}={getattr(settings, unlike[0])!r}"
    with begun("fit", task, data):
        is_iterator = hasattr(fit_data(data, None)[0], "__next__")
    return "the data is an iterator, which can be read once" if is_iterator else ""


def _by_hand(settings: RunSettings, task: TaskModule, data: Any, engine: Engine, seconds: float) -> float:
    """Return the seconds of a step of a hand-written loop over the task that a fit has trained.

    Its weights, its optimizer's state and its compilation are the fit's.
    """
    clock = BlockClock(seconds)
    clock.wait = getattr(torch, engine.device.type).synchronize
    Compilation(settings.compile, engine.strategy).add(task)
    task.train()
    with (
        engine.precision.process_context(),
        begun("fit", task, data),
        closing(_loop(settings, task, fit_data(data, None)[0], engine)) as steps,
    ):
        while not clock.step():
            next(steps)
    return clock.fastest


def _loop(settings: RunSettings, task: TaskModule, data: Any, engine: Engine) -> Generator[None, None, None]:
    """Forward, loss, backward, clip, step and zero_grad, as one writes them by hand."""
    device, dtype = engine.device, engine.precision.input_dtype
    accumulation: Any = settings.gradient_accumulation_steps
    context = engine.precision.forward_context(device) or nullcontext
    optimizer, norm = engine.optimizer.optimizer, engine.optimizer.max_grad_norm
    parameters = [each for each in task.parameters() if each.requires_grad]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    batches = _batches(settings, task, data, device)
    while True:
        rest = iter(batches)
        while window := list(islice(rest, accumulation)):
            for batch in window:
                if device.type != "cpu" or dtype is not None:
                    batch = map_tensors(moved, batch)
                with context():
                    loss: Any = read_output(task.training_step(batch))[0]
                (loss / accumulation if accumulation > 1 else loss).backward()
            if norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, norm)
            optimizer.step()
            optimizer.zero_grad()
            yield


def _batches(settings: RunSettings, task: TaskModule, data: Any, device: torch.device) -> Iterable[Any]:
    data = data.data if isinstance(data, AlreadySplit) else data
    size: Any = getattr(data, "batch_size", None) or settings.batch_size
    if not is_dataset(data) or (size is None and not hasattr(data, "__len__")):
        return data  # type: ignore[no-any-return]
    return DataLoader(
        data,
        size,
        shuffle=hasattr(data, "__len__"),
        num_workers=settings.num_workers,
        collate_fn=settings.collate or info_of(task).collate,
        pin_memory=device.type == "cuda",
    )
