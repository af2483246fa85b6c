"""Run a task under every combination of some settings, each in processes of its own, in rounds of turns."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from drivetrain.core import errors
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import seed_host
from drivetrain.core.validation import by_name, count, keywords, number
from drivetrain.distributed.launch.calls import Call, wait_for_calls
from drivetrain.distributed.launch.environment import detect
from drivetrain.task.task import TaskModule
from drivetrain.testing.benchmark.result import BenchmarkResult, BenchmarkRow
from drivetrain.testing.benchmark.turn import LENGTH, BlockClock, turn
from drivetrain.trainer.trainer import Trainer

_LOG = logger(__name__)

Combination = Mapping[str, Any]

Make = Callable[[Combination], tuple[Trainer, Callable[[], TaskModule], Callable[[], Any]]]
"""Returns the Trainer of a combination, and functions that make its task and its data."""


@by_name
def benchmark(
    make_task: Callable[..., TaskModule],
    data: Any,
    over: Mapping[str, Sequence[Any]],
    *,
    trainer: Trainer | None = None,
    rounds: int = 3,
    seconds: float = 2.0,
    limit: float = 600.0,
) -> BenchmarkResult:
    """Measure the steps of a task under every combination of some settings.

    In each round every combination takes one turn, in another order each time. A turn runs in a process of
    its own, with the ranks that its strategy asks for. A combination that runs out of memory, crashes or
    hangs becomes a row with its reason, and the others go on. A turn times twenty blocks of steps, and the
    fastest block counts.

    The benchmark sets the length of each fit. Checkpoints, loggers, the progress bar and validation are off,
    unless `over` compares them. Early stopping, schedules that follow a logged value, and the task's own
    callbacks play no part. Call
    `benchmark` before this process uses a GPU.

    Args:
        make_task: Makes the task: a function, or its class.
        data: The training data as for `Trainer.fit`, or a function or class that makes it.
        over: The values to compare, by the Trainer's arguments: `{"strategy": ["cpu", "ddp"]}`. "task.NAME"
            is an argument of `make_task`, and "data.NAME" one of `data`.
        trainer: The other settings; None takes the Trainer's defaults.
        rounds: The number of rounds.
        seconds: The time of a turn that is measured. The first steps add to it.
        limit: Seconds after which a turn is ended, and its combination fails.

    Raises:
        ConfigError: An unknown name in `over`; the message gives the nearest. Or this process has used CUDA,
            or is a rank.
    """
    if not callable(make_task) or isinstance(make_task, TaskModule):
        raise ConfigError(
            f"make_task must be a function that makes the task, or its class, not {type(make_task).__name__}:"
            " each turn begins with a new one. Write `lambda: task`"
        )
    if not isinstance(trainer, Trainer | None):
        raise ConfigError(f"benchmark(trainer=) must be a Trainer or None, not {trainer!r}")
    makes_data = inspect.isroutine(data) or isinstance(data, (type, partial))
    check_over(over, {"task": keywords(make_task), "data": keywords(data) if makes_data else frozenset()})
    make = partial(_make, make_task, data, makes_data, trainer or Trainer())
    return run_turns(make, over, rounds=rounds, seconds=seconds, limit=limit)


def run_turns(
    make: Make, over: Mapping[str, Sequence[Any]], *, rounds: int, seconds: float, limit: float
) -> BenchmarkResult:
    """Let each combination take its turns; see `benchmark`."""
    count("rounds", rounds, at_least=1)
    number("seconds", seconds, above=0)
    number("limit, the seconds of a turn,", limit, above=0)
    job, uses_cuda = detect(os.environ), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if uses_cuda or (job is not None and job.world_size > 1):
        why = (
            "has used CUDA, so its forks cannot use it"
            if uses_cuda
            else "is a rank, and a benchmark starts its own"
        )
        raise ConfigError(f"this process {why}. Call the benchmark first, in a program without a launcher")
    combinations = [dict(zip(over, each, strict=True)) for each in itertools.product(*over.values())]
    found: list[list[dict[str, Any]]] = [[] for _ in combinations]
    failures: dict[int, str] = {}
    for round_ in range(rounds):
        order = [each for each in range(len(combinations)) if each not in failures]
        if order:
            _LOG.info("benchmark: round %d of %d, %d combinations", round_ + 1, rounds, len(order))
        for each in random.Random(round_).sample(order, len(order)) if round_ else order:
            with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
                made, why = _in_process(partial(_turn, make, combinations[each], seconds, folder), limit)
            if why:
                failures[each] = why
            else:
                found[each].append(made)
    rows = [
        BenchmarkRow(settings=combination, failure=failures[each])
        if each in failures
        else BenchmarkRow.of_rounds(combination, found[each])
        for each, combination in enumerate(combinations)
    ]
    return BenchmarkResult(rows, rounds)


def check_over(over: Mapping[str, Sequence[Any]], options: Mapping[str, frozenset[str] | None]) -> None:
    """Check the names and the kinds of what is compared."""
    if not isinstance(over, Mapping):
        raise ConfigError(f"over must be a mapping of names to lists of values, not {over!r}")
    fixed = (*LENGTH, "run_dir")
    names = [each.name for each in dataclasses.fields(Trainer) if each.name not in fixed]
    for name, values in over.items():
        owner, dot, option = name.partition(".") if isinstance(name, str) else ("", "", "")
        if name in fixed:
            raise ConfigError(f"over cannot compare {name}, which the benchmark sets itself")
        if dot and owner in options:
            allowed = options[owner]
            if allowed is not None and option not in allowed:
                hint = nearest(name, [f"{owner}.{each}" for each in allowed])
                raise ConfigError(f"over has {name!r}, but the {owner} is made without {option!r}. {hint}")
        elif name not in names:
            raise ConfigError(f"over has an unknown name {name!r}. {nearest(str(name), names)}")
        if not isinstance(values, (list, tuple)) or not values:
            raise ConfigError(f"over[{name!r}] must be a list of the values to compare, not {values!r}")


def _make(
    make_task: Callable[..., TaskModule],
    data: Any,
    makes_data: bool,
    trainer: Trainer,
    combination: Combination,
) -> tuple[Trainer, Callable[[], TaskModule], Callable[[], Any]]:
    own: dict[str, dict[str, Any]] = {"task": {}, "data": {}, "": {}}
    for name, value in combination.items():
        owner, _, option = name.rpartition(".")
        own[owner][option] = value
    return (
        dataclasses.replace(trainer, **own[""]),
        partial(make_task, **own["task"]),
        partial(data, **own["data"]) if makes_data else lambda: data,
    )


def _turn(make: Make, combination: Combination, seconds: float, folder: str) -> dict[str, Any]:
    clock = BlockClock(seconds)
    trainer, task, data = make(combination)
    seed_host(trainer.seed)
    return turn(trainer, task(), data(), combination, clock, folder)


def _in_process(function: Callable[[], Any], limit: float) -> tuple[Any, str]:
    """Call a function in a new process, which is killed with all that it has started after `limit` seconds.

    Returns:
        What it returned, and why there is nothing, empty if there is.
    """
    # A fork from a thread that has never used OpenMP can use several threads. One from a thread that has,
    # such as a main thread, would wait forever for threads that exist in its parent alone.
    with ThreadPoolExecutor(1) as thread:
        try:
            call = thread.submit(Call, partial(_as_turn, function)).result()
        except Exception as error:  # of pickling
            return None, f"{sys.platform} starts a new Python, which cannot import all of it: {error}"
        try:
            late = wait_for_calls([call], limit)
        finally:
            with suppress(AttributeError, ProcessLookupError):  # on Windows; all have ended
                os.killpg(call.child.pid, signal.SIGKILL)  # its ranks and workers too
            call.close()
    if late:
        return None, f"it gave no result within {limit:g} s (limit)"
    if call.cause is None:
        return call.value, ""
    if call.cause.kind == "lost":
        killed = ", as the system does when memory runs out" if "SIGKILL" in call.cause.what else ""
        return None, f"its process {call.cause.what.removeprefix('it ')}{killed}"
    name, text = call.error
    text = text.partition("\ndrivetrain: ")[0]  # without the notes
    return None, text if hasattr(errors, name) else f"{name}: {text}"


def _as_turn(function: Callable[[], Any]) -> Any:
    with suppress(AttributeError):  # on Windows
        os.setpgid(0, 0)
    os.dup2(2, 1)  # what a task prints does not belong into the table or the JSON
    return function()
