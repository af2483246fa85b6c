"""Run a function of a test in several processes of this machine, with a real process group."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed

from drivetrain.distributed.launch.children import end_with, environment_of
from drivetrain.distributed.launch.forks import resume_garbage_collection, without_garbage_collection
from drivetrain.distributed.sockets import reserved_port

_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
"""Fork saves the seconds that a spawned process takes to import torch, but is safe only on Linux."""


_GRACE = 0.5
"""Seconds to wait after a failure for reports of earlier ones."""


def run_distributed(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, timeout: float = 300.0
) -> list[Any]:
    """Call a function in several processes that form a gloo process group.

    The environment has the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
    Each process uses one thread.

    Args:
        function: The function to call in each process with `arguments`. On systems that spawn processes it
            must be importable.
        world_size: The number of processes.
        timeout: Time limit in seconds, including the start of the processes.

    Returns:
        The return values, by rank.

    Raises:
        RuntimeError: A call raised, or a process died. The message has the first failure and its rank.
        TimeoutError: The time limit was exceeded. All processes are killed.
    """
    context: Any = multiprocessing.get_context(_START_METHOD)
    is_main = threading.current_thread() is threading.main_thread()  # whose end Linux takes for its process's
    parent = os.getpid() if is_main else None
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    with reserved_port() as port:
        for rank in range(world_size):
            receiver, sender = context.Pipe()
            environment = environment_of(rank, world_size, port, threads=None)
            process = context.Process(
                target=_child, args=(sender, environment, function, arguments, timeout, parent)
            )
            with without_garbage_collection():
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


def _collect(
    pipes: dict[Connection, int], processes: list[BaseProcess], deadline: float, timeout: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting = dict(pipes)
    while waiting:
        # A failed rank makes the ranks that wait for it fail too. The earliest failure is the cause.
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
                each.send(None)
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                # A kill is a cause. An exit without an exception follows from another rank's failure.
                moment = 0.0 if code is None or code < 0 else math.inf
                failed, value = True, f"it died with exit code {code} and reported no exception"
            if failed:
                failures.append((moment, rank, value))
            results[rank] = value
    if failures:
        _, rank, text = min(failures)
        raise RuntimeError(f"rank {rank} failed:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _send(sender: Connection, failed: bool, value: Any) -> None:
    sender.send((time.monotonic(), failed, value))
    with suppress(EOFError, ConnectionError):  # the parent has given up
        sender.recv()  # until it has opened the tensors, which are in shared memory of this process


def _child(
    sender: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout: float,
    parent: int | None,
) -> None:
    resume_garbage_collection()
    if parent is not None:
        end_with(parent)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        value = function(*arguments)
        # Wait for all ranks: leaving early would break the connections of the others.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        _send(sender, False, value)
    except BaseException:  # reported at once, before other ranks fail because of it
        _send(sender, True, traceback.format_exc())
    sender.close()
    # os._exit skips the parent's exit handlers, which a forked process inherits.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
