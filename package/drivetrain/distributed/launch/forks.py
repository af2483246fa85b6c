"""Ranks for a program that cannot be run again, such as a notebook: forks of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed.failure.messages import Cause, is_voluntary
from drivetrain.distributed.group import disband
from drivetrain.distributed.launch.calls import Call, first_cause, wait_for_calls
from drivetrain.distributed.launch.children import end_all, environment_of, started
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.meeting import make_store_folder, remove_store_folder
from drivetrain.distributed.sockets import reserved_port

T = TypeVar("T")

_GRACE = 4.0
"""Seconds that the forks have to end by themselves after a failure."""

_PATIENCE = 60.0
"""Seconds that they have if nothing has failed."""


def fork_ranks(function: Callable[[], T], world_size: int) -> T:
    """Call a function on every rank of a job: here as rank 0, in forks of this process as the others.

    Each rank has torchrun's environment variables and uses one thread. Afterwards the forks are gone and the
    environment is restored, so it can be called again. Only rank 0's changes to the program's memory stay.

    Args:
        function: Takes no arguments. It may form a process group, which is disbanded.

    Returns:
        The function's result on rank 0.

    Raises:
        StrategyError: This process cannot be forked; says what to do instead.
        RankFailure: Another rank failed; names its error.
        Exception: The function raised here.
    """
    _check(world_size)
    calls: list[Call] = []
    with reserved_port() as port:
        variables = make_store_folder(port)
        try:
            with _changed({**environment_of(0, world_size, port, threads=1), **variables}):
                for rank in range(1, world_size):
                    own = environment_of(rank, world_size, port, threads=1)
                    call = Call(partial(_as_other_rank, function, own), rank, method="fork")
                    calls.append(call)
                    started[rank] = call.child
                return _as_rank_0(function, calls)
        finally:
            for each in calls:
                each.close()
                started.pop(each.child.rank, None)
            remove_store_folder(variables)


def _check(world_size: int) -> None:
    found = detect(os.environ)
    if found is not None:
        raise StrategyError(f"this process is one of {found.world_size} already; it cannot start ranks")
    instead = f"Write the program to a file and start it as a script: it then runs as {world_size} processes"
    if not hasattr(os, "fork"):
        raise StrategyError(f"{sys.platform} cannot fork a process. {instead}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise StrategyError(
            "CUDA is in use in this process, and a fork of it cannot use CUDA. So a notebook can run one fit"
            " on several GPUs, before anything else uses a GPU: restart it. Or else:"
            f" {instead[0].lower()}{instead[1:]}"
        )


def _as_rank_0(function: Callable[[], T], calls: Sequence[Call]) -> T:
    try:
        result = _disbanding(function)
    except Exception as error:
        wait_for_calls(calls, _GRACE, _GRACE)
        end_all([each.child for each in calls])
        first = first_cause(calls)
        if first is not None and _explains_more(first, error):
            failure = first.failure()
            raise failure from failure.__cause__
        raise
    late = wait_for_calls(calls, _PATIENCE, _GRACE)
    first = first_cause(calls)
    if first is not None:
        raise first.failure()
    if late:
        raise RankFailure(f"rank {late[0].child.rank} still ran {_PATIENCE:g} s after rank 0 and was killed")
    return result


def _as_other_rank(function: Callable[[], Any], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        _disbanding(function)
    except SystemExit as error:
        if not is_voluntary(error):
            raise


def _disbanding(function: Callable[[], T]) -> T:
    try:
        return function()
    finally:
        disband()


def _explains_more(first: Cause, error: Exception) -> bool:
    """Return whether the forks' first cause says more than the error that it has led to here."""
    if isinstance(error, RankFailure):  # it may only know that a process has ended
        return first.kind == "error" and error.__cause__ is None
    return Cause.of_error(0, "", error).kind == "consequence"


@contextmanager
def _changed(environment: dict[str, str]) -> Iterator[None]:
    """Run the block with rank 0's environment and one thread."""
    before = {name: os.environ.get(name) for name in environment}
    threads = torch.get_num_threads()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
