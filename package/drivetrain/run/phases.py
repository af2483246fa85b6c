"""The phases of a fit by name: how long each takes, and its range in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from drivetrain.run.hooks import HOOKS, is_used

if TYPE_CHECKING:
    from drivetrain.core.types import Logger
    from drivetrain.data import Feed
    from drivetrain.run.run import Run

_TIMED = {"evaluation": "validation", "save": "saving", "restore": "restoring"}
"""The phases of the kinds of time that `Run.timed` is given."""


@dataclass(slots=True)
class PhaseTime:
    """One phase.

    Attributes:
        calls: How often it has ended.
        seconds: The host's time in it.
        own: The same without that of the phases inside it.
    """

    calls: int = 0
    seconds: float = 0.0
    own: float = 0.0


@dataclass(slots=True)
class _Open:
    """A phase that has begun: its entry, its start, the time of phases inside it, and its range."""

    phase: PhaseTime
    start: float
    inside: float = 0.0
    range: record_function | None = None


class Phases:
    """A clock of nested phases, of one thread. It reads the host's clock and waits for no device.

    Attributes:
        found: The phases by name, in the order of their first beginning.
        traced: Whether phases that begin now are ranges for torch's profiler too.
        seconds: The sum of the own times of all phases.
    """

    def __init__(self) -> None:
        self.found: dict[str, PhaseTime] = {}
        self.traced = False
        self._open: list[_Open] = []

    @property
    def seconds(self) -> float:
        return sum(each.own for each in self.found.values())

    def begin(self, name: str) -> None:
        """Begin a phase inside the one that has begun last."""
        phase = self.found.get(name)
        if phase is None:
            phase = self.found[name] = PhaseTime()
        entry = _Open(phase, perf_counter())
        if self.traced:
            entry.range = record_function(name)
            entry.range.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(entry)

    def end(self, calls: int = 1) -> None:
        """End the phase that has begun last, and count it so many times."""
        entry = self._open.pop()
        if entry.range is not None:
            entry.range.__exit__(None, None, None)
        passed = perf_counter() - entry.start
        entry.phase.calls += calls
        entry.phase.seconds += passed
        entry.phase.own += passed - entry.inside
        if self._open:
            self._open[-1].inside += passed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the block as a phase."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def around(self, name: Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are phases.

        Args:
            name: Returns the phase's name at each call.
            function: The function. The result has it as `__wrapped__`.
        """

        def call(*args: Any, **options: Any) -> Any:
            self.begin(name())
            try:
                return function(*args, **options)
            finally:
                self.end()

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    def each(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator that counts each item as a call of the phase that waits for it."""
        while True:
            self.begin(name)
            calls = 0
            try:
                item = next(items)
                calls = 1
            except StopIteration:
                return
            finally:
                self.end(calls)
            yield item


@contextmanager
def phases_of(run: Run, phases: Phases, before_step: Callable[[int], None]) -> Iterator[None]:
    """Run the block, a fit, with its parts as phases.

    They are timed by functions that stand before the methods of this run's own objects. So a fit without
    this costs nothing, and afterwards the objects are as before.

    Args:
        before_step: Called before the data of each step is asked for, with the number of steps before
            it in this program.
    """
    engine, strategy = run.engine, run.engine.strategy
    stepping = engine if engine.splitter is None else engine.splitter
    with ExitStack() as stack:
        for owner, method, name in (
            (stepping, "train_step", "step"),
            (engine, "evaluation_step", "step"),
            (engine.transfer, "moved", "transfer"),
            (engine.transfer, "started", "transfer"),
            (strategy, "backward", "backward"),
            (strategy, "clip_grad_norm", "clip"),
            (strategy, "optimizer_step", "optimizer"),
            (run, "log_training", "log point"),
        ):
            timed = phases.around(_name_in_stage(run, name), getattr(owner, method))
            _replace(stack, owner, method, timed)
        for feed in (run.train_feed, *(feed for _, feed in run.evaluation_feeds)):
            if feed is not None:
                _watch_feed(stack, run, phases, feed)
        if run.train_feed is not None:
            _watch_steps(stack, run.train_feed, before_step)
        _watch_forward(stack, run, phases)
        _watch_blocks(stack, run, phases)
        _watch_hooks(stack, run, phases)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set an attribute of an object until the stack is closed."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, new)


def _name_in_stage(run: Run, name: str) -> Callable[[], str]:
    """Return a function that gives the name with the stage in it: "data" in training, "validation data"."""
    return lambda: name if run.stage == "train" else f"{run.stage} {name}"


def _watch_forward(stack: ExitStack, run: Run, phases: Phases) -> None:
    engine, freeze, named = run.engine, run.engine.freeze, _name_in_stage(run, "forward")

    def watch() -> None:
        engine.run_step = phases.around(named, engine.run_step)

    def leave() -> None:
        engine.run_step = getattr(engine.run_step, "__wrapped__", engine.run_step)

    def frozen(names: Collection[str]) -> None:  # it chooses another step
        freeze(names)
        watch()

    watch()
    stack.callback(leave)
    _replace(stack, engine, "freeze", frozen)


def _watch_feed(stack: ExitStack, run: Run, phases: Phases, feed: Feed) -> None:
    read, named = feed.micro_batches, _name_in_stage(run, "data")

    def micro_batches(*args: Any, **options: Any) -> Iterator[Any]:
        name = named()
        phases.begin(name)
        try:  # the start of workers
            items = read(*args, **options)
        finally:
            phases.end(calls=0)
        return phases.each(name, items)

    _replace(stack, feed, "micro_batches", micro_batches)


def _watch_steps(stack: ExitStack, feed: Feed, before_step: Callable[[int], None]) -> None:
    read, made = feed.windows, 0

    def windows(*args: Any, **options: Any) -> Generator[Any, None, None]:
        nonlocal made
        with closing(read(*args, **options)) as found:
            while True:
                before_step(made)
                window = next(found, None)
                if window is None:
                    return
                made += 1
                yield window

    _replace(stack, feed, "windows", windows)


def _watch_blocks(stack: ExitStack, run: Run, phases: Phases) -> None:
    timed, logging_to = run.timed, run.logging_to

    @contextmanager
    def timed_too(kind: str) -> Iterator[None]:
        with phases.phase(_TIMED.get(kind, kind)), timed(kind):
            yield

    @contextmanager
    def logging_timed(logger: Logger, lost: str) -> Iterator[None]:
        with phases.phase(type(logger).__name__), logging_to(logger, lost):
            yield

    _replace(stack, run, "timed", timed_too)
    _replace(stack, run, "logging_to", logging_timed)


def _watch_hooks(stack: ExitStack, run: Run, phases: Phases) -> None:
    labels, seen = [], Counter[str]()
    for callback in run.callbacks:
        name = type(callback).__name__
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    for hook in HOOKS:
        new = [
            phases.around(partial(str, f"{label}.{hook}"), getattr(callback, hook))
            for label, callback in zip(labels, run.callbacks, strict=True)
            if is_used(getattr(callback, hook, None))
        ]
        _replace(stack, run.hooks, hook, tuple(new))
