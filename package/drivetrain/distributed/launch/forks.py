"""Ranks for a program that cannot be run again, such as a notebook: forks of this process."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed.failure.messages import Cause
from drivetrain.distributed.launch.children import (
    Child,
    Guard,
    end_all,
    end_with_parent,
    ending,
    environment_of,
    parent_mark,
    started,
    wait_for,
)
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.meeting import STORE, private_place, remove_place
from drivetrain.distributed.sockets import reserved_port

T = TypeVar("T")

_GRACE = 4.0
"""Seconds that the forks have to end by themselves after a failure."""

_PATIENCE = 60.0
"""Seconds that they have if nothing has failed."""

_LONGEST = 5_000
"""Characters of a message or a traceback that a fork sends: together, as JSON, they fit into a pipe."""


def fork_ranks(function: Callable[[], T], world_size: int) -> T:
    """Call a function on every rank of a job: here as rank 0, in forks of this process as the others.

    Each rank has torchrun's environment variables and uses one thread. Afterwards the forks are gone and the
    environment is restored, so it can be called again. Only rank 0's changes to the program's memory stay.

    Args:
        function: Takes no arguments; forms a process group, and leaves it.

    Returns:
        The function's result on rank 0.

    Raises:
        StrategyError: This process cannot be forked; says what to do instead.
        RankFailure: Another rank failed; names its error.
        Exception: The function raised here.
    """
    _check(world_size)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise each fork would write what is still buffered
    children: list[Child] = []
    pipes: list[int] = []
    guard: Guard | None = None
    with reserved_port() as port:
        place = private_place(port)
        try:
            with _changed({**environment_of(0, world_size, port, threads=1), **place}):
                for rank in range(1, world_size):
                    own = environment_of(rank, world_size, port, threads=1)
                    child, pipe = fork_copy(function, rank, own, pipes)
                    children.append(child)
                    pipes.append(pipe)
                    started[rank] = child
                guard = Guard(children, place[STORE], kills_parent=False)  # a notebook stays
                return _as_rank_0(function, children, pipes)
        finally:
            end_all(children, grace=0)
            if guard is not None:
                guard.end()
            remove_place(place)
            for each in children:
                started.pop(each.rank, None)
            for pipe in pipes:
                os.close(pipe)


def _check(world_size: int) -> None:
    found = detect(os.environ)
    if found is not None:
        raise StrategyError(
            f"this process is one of {found.world_size} already; it cannot have ranks of its own"
        )
    instead = f"Write the program to a file and start it as a script: it then runs as {world_size} processes"
    if not hasattr(os, "fork"):
        raise StrategyError(f"{sys.platform} cannot fork a process. {instead}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise StrategyError(
            "CUDA is in use in this process, and a fork of it cannot use CUDA. So a notebook can run one fit"
            " on several GPUs, before anything else uses a GPU: restart it. Or else:"
            f" {instead[0].lower()}{instead[1:]}"
        )


def _as_rank_0(function: Callable[[], T], children: Sequence[Child], pipes: Sequence[int]) -> T:
    try:
        result = function()
    except Exception as error:
        wait_for(children, _GRACE)
        end_all(children)
        first = _first_cause(children, pipes)
        if first is not None and _explains_more(first, error):
            failure = first.failure()
            raise failure from failure.__cause__
        raise
    late = wait_for(children, _PATIENCE)
    if late:
        raise RankFailure(f"rank {late[0].rank} still ran {_PATIENCE:g} s after rank 0 and was killed")
    first = _first_cause(children, pipes)
    if first is not None:
        raise first.failure()
    return result


def _explains_more(first: Cause, error: Exception) -> bool:
    """Return whether the forks' first cause says more than the error that it has led to here."""
    if isinstance(error, RankFailure):  # it may only know that a process has ended
        return first.kind == "error" and error.__cause__ is None
    return Cause.of_error(0, "", error).kind == "consequence"


def _first_cause(children: Sequence[Child], pipes: Sequence[int]) -> Cause | None:
    causes = []
    for child, pipe in zip(children, pipes, strict=True):
        if (cause := cause_of_end(child, pipe)) is not None:
            causes.append(cause)
    order = ("error", "lost", "consequence")
    return min(causes, key=lambda each: order.index(each.kind), default=None)


def cause_of_end(child: Child, pipe: int) -> Cause | None:
    """Return why a fork has failed: the error that it raised, or how its process ended; else None."""
    code = child.poll()
    try:
        text = os.read(pipe, 1 << 16)
    except BlockingIOError:  # empty, and a worker of the fork still holds the other end
        text = b""
    if text:
        return Cause.from_json(json.loads(text))
    return Cause("lost", child.rank, "", f"it {ending(code)}") if code else None


def fork_copy(
    function: Callable[[], Any], rank: int, environment: Mapping[str, str], others: Sequence[int]
) -> tuple[Child, int]:
    """Call a function in a fork of this process, which ends with it, and with this process.

    Args:
        others: Pipes of other forks, which it closes.

    Returns:
        The fork, and a pipe for `cause_of_end`, which the caller closes.
    """
    mark = parent_mark()
    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    with warnings.catch_warnings():
        # Python warns of forking a process with threads. The fork uses no lock that they may hold.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        with without_garbage_collection():
            pid = os.fork()
            if pid == 0:
                gc.freeze()
    if pid == 0:
        _run_copy(function, rank, environment, sender, (*others, receiver), mark)
    os.close(sender)
    return Child(rank, pid, _poll(pid)), receiver


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Run the block, which forks, so that the fork collects no garbage that it inherits.

    The destructor of an earlier run's leftovers, such as a process group in a traceback, would wait for
    threads that a fork does not have.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def resume_garbage_collection() -> None:
    """Collect garbage in a fork made under `without_garbage_collection`, except inherited objects."""
    gc.freeze()
    gc.enable()


def _run_copy(
    function: Callable[[], Any],
    rank: int,
    environment: Mapping[str, str],
    sender: int,
    closed: Sequence[int],
    mark: str,
) -> NoReturn:
    # The fork ends here, whatever happens: the rest of the program is for the original.
    code = 1
    try:
        for each in closed:
            os.close(each)
        nothing = os.open(os.devnull, os.O_RDONLY)  # standard input is the original's
        os.dup2(nothing, 0)
        os.close(nothing)
        started.clear()
        end_with_parent(mark)
        os.environ.update(environment)
        torch.set_num_threads(1)
        function()
        code = 0
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            code = 0
        else:
            cause = Cause.of_error(rank, "", error)
            cause = replace(cause, what=cause.what[:_LONGEST], frames=cause.frames[-_LONGEST:])
            os.write(sender, json.dumps(cause.to_json()).encode())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _poll(pid: int) -> Callable[[], int | None]:
    lock = threading.Lock()
    code: int | None = None

    def poll() -> int | None:
        nonlocal code
        with lock:
            if code is None:
                try:
                    found, status = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:  # something else has read the exit code before
                    code = 0
                else:
                    code = os.waitstatus_to_exitcode(status) if found else None
            return code

    return poll


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
