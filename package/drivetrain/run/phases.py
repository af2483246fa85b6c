"""The parts of a fit's steps as spans of the run's clock, for a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.run.hooks import HOOKS, is_used

if TYPE_CHECKING:
    from drivetrain.data import Feed
    from drivetrain.run.run import Run


@contextmanager
def timing_parts(run: Run, before_step: Callable[[int], None]) -> Iterator[None]:
    """Run the block, a fit, with the parts of its steps as spans of the run's clock.

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
            timed = run.clock.wrap(_name_in_stage(run, name), getattr(owner, method))
            _replace(stack, owner, method, timed)
        for feed in (run.train_feed, *(feed for _, feed in run.evaluation_feeds)):
            if feed is not None:
                _watch_feed(stack, run, feed)
        if run.train_feed is not None:
            _watch_steps(stack, run.train_feed, before_step)
        _watch_forward(stack, run)
        _watch_hooks(stack, run)
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


def _watch_forward(stack: ExitStack, run: Run) -> None:
    engine, freeze, named = run.engine, run.engine.freeze, _name_in_stage(run, "forward")

    def watch() -> None:
        engine.run_step = run.clock.wrap(named, engine.run_step)

    def leave() -> None:
        engine.run_step = getattr(engine.run_step, "__wrapped__", engine.run_step)

    def frozen(names: Collection[str]) -> None:  # it chooses another step
        freeze(names)
        watch()

    watch()
    stack.callback(leave)
    _replace(stack, engine, "freeze", frozen)


def _watch_feed(stack: ExitStack, run: Run, feed: Feed) -> None:
    read, named = feed.micro_batches, _name_in_stage(run, "data")

    def micro_batches(*args: Any, **options: Any) -> Iterator[Any]:
        name = named()
        with run.clock.span(name, calls=0):  # the start of workers
            items = read(*args, **options)
        return run.clock.each(name, items)

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


def _watch_hooks(stack: ExitStack, run: Run) -> None:
    labels, seen = [], Counter[str]()
    for callback in run.callbacks:
        name = type(callback).__name__
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    for hook in HOOKS:
        new = [
            run.clock.wrap(partial(str, f"{label}.{hook}"), getattr(callback, hook))
            for label, callback in zip(labels, run.callbacks, strict=True)
            if is_used(getattr(callback, hook, None))
        ]
        _replace(stack, run.hooks, hook, tuple(new))
