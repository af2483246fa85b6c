"""Real process groups for tests: a function on several processes of this machine."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed

from drivetrain.distributed.children import environment_of
from drivetrain.distributed.forking import collect_own, uncollected
from drivetrain.distributed.sockets import release_port, reserve_port

_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
"""A forked process has torch at once, which takes a spawned one seconds; only Linux forks safely enough."""


_GRACE = 0.5
"""Seconds to wait, after a failure, for failures that came before it."""


def run_distributed(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, timeout: float = 60.0
) -> list[Any]:
    """Call a function in several processes that form a gloo process group.

    The environment has what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Each
    process uses one thread.

    Args:
        function: Is called in each process with `arguments`. On systems that spawn processes it must be one
            that can be imported.
        world_size: How many processes.
        timeout: In seconds, for all together, set-up included.

    Returns:
        What each call returned, by rank.

    Raises:
        RuntimeError: A call raised, or a process died; has the first cause, with its rank.
        TimeoutError: It took too long; all processes are ended.
    """
    context: Any = multiprocessing.get_context(_START_METHOD)
    port = reserve_port()
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        environment = environment_of(rank, world_size, port, threads=None)
        process = context.Process(target=_child, args=(sender, environment, function, arguments, timeout))
        with uncollected():
            process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = rank
    try:
        return _collect(pipes, processes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
        release_port(port)


def _collect(
    pipes: dict[Connection, int], processes: list[BaseProcess], deadline: float, timeout: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting = dict(pipes)
    while waiting:
        # One failure brings others about: those who wait for a rank that is gone. The first is the cause.
        patience = _GRACE if failures else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), patience)
        if not ready and not failures:
            raise TimeoutError(f"ranks {sorted(waiting.values())} have not ended within {timeout:g} seconds")
        if not ready:
            break
        for each in ready:
            assert isinstance(each, Connection)
            rank = waiting.pop(each)
            try:
                moment, failed, value = each.recv()
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                # A kill is a cause; an exit without a word follows from what another rank tells.
                moment = 0.0 if code is None or code < 0 else math.inf
                failed, value = True, f"it died with exit code {code}, without a word"
            if failed:
                failures.append((moment, rank, value))
            results[rank] = value
    if failures:
        _, rank, text = min(failures)
        raise RuntimeError(f"rank {rank} failed:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _child(
    sender: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout: float,
) -> None:
    collect_own()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        value = function(*arguments)
        # Nobody leaves before all are done: whoever is still connected would see a broken connection.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sender.send((time.monotonic(), False, value))
    except BaseException:  # whatever it is, the parent is to hear of it, and before the others notice
        sender.send((time.monotonic(), True, traceback.format_exc()))
    sender.close()
    # Not by way of the parent's exit handlers, which a forked process has inherited.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
