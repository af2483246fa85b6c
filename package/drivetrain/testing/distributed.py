"""Run a function of a test in several processes of this machine, with a real process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from drivetrain.distributed.launch.calls import Call, first_cause, wait_for_calls
from drivetrain.distributed.launch.children import environment_of
from drivetrain.distributed.sockets import reserved_port

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
    calls: list[Call] = []
    with reserved_port() as port:
        try:
            for rank in range(world_size):
                environment = environment_of(rank, world_size, port, threads=None)
                calls.append(Call(partial(_as_rank, environment, timeout, function, arguments), rank))
            late = wait_for_calls(calls, timeout, _GRACE)
        finally:
            for each in calls:
                each.close()
    first = first_cause(calls)
    if first is not None:
        raise RuntimeError(f"rank {first.rank} failed:\n{first.frames or first.what}")
    if late:
        ranks = [each.child.rank for each in late]
        raise TimeoutError(f"ranks {ranks} have not ended within {timeout:g} seconds")
    return [each.value for each in calls]


def _as_rank(
    environment: dict[str, str], timeout: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    value = function(*arguments)
    # Wait for all ranks: leaving early would break the connections of the others.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return value
