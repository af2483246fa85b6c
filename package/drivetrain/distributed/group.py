"""Joining the processes of a job into one process group, and leaving it again."""

from __future__ import annotations

import atexit
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import (
    DebugLevel,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    get_debug_level,
    set_debug_level,
)
from torch.distributed.rendezvous import rendezvous

from drivetrain.distributed.children import Child, ending, started, wait_for
from drivetrain.distributed.environment import ProcessEnvironment, detect
from drivetrain.distributed.gathering import gather, note_end
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.distributed.sockets import opened_here
from drivetrain.errors import RankFailure, StrategyError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What connects the processes, by the kind of device that their tensors are on."""

_HERE = "drivetrain/here/{}"
"""In the store: the ranks that have found it."""

_LOOKING = 0.05
"""Seconds between two looks at whether the ranks that this process has started have come."""

_LETTING_GO = 0.02
"""Seconds at the end in which other threads may have the interpreter's lock."""

_formed = False
_process = 0
"""The process that is a member; a copy of it has the same memory."""


@dataclass(frozen=True)
class Member:
    """This process as one of a job's.

    Attributes:
        rank: This process, from 0.
        world_size: How many there are.
        device: Where its model lives.
        ranks: All of them, for what they exchange on the host.
    """

    rank: int
    world_size: int
    device: torch.device
    ranks: Ranks


def join(world_size: int, device: str, timeout: timedelta | None = None) -> Member:
    """Join the process group of the job that the environment tells of, or one that is there already.

    A group that is formed here stays for the runs that follow, until the program ends or `disband` is called:
    processes that form another in the same place would meet what is left of the first.

    Args:
        world_size: How many processes the run has.
        device: The kind of device, "cpu" or "cuda"; each process takes the one of its local rank.
        timeout: How long a collective may take; None for torch's own limit.

    Raises:
        StrategyError: No job, another number of processes, or a group that cannot be formed.
        RankFailure: A rank has ended instead of joining.
    """
    global _process
    environment = detect(os.environ)
    if not distributed.is_initialized():
        _connect(environment, world_size, device, timeout)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size != world_size:
        raise StrategyError(
            f"the process group has {size} processes, and this run asks for {world_size}. Give devices and"
            " num_nodes that multiply to the number that the launcher started"
        )
    if _process != os.getpid():
        _process = os.getpid()
        atexit.register(_end)
    if size > 1:
        gather(rank, size)
    local = environment.local_rank if environment is not None else rank
    ranks = Ranks.of_job() if size > 1 else ALONE
    return Member(rank, size, _own_device(device, local), ranks)


def _connect(
    environment: ProcessEnvironment | None, world_size: int, device: str, timeout: timedelta | None
) -> None:
    if environment is None and world_size > 1:
        raise StrategyError(
            f"a run of {world_size} processes needs them to be started: by the Trainer, `drivetrain launch`,"
            " torchrun or a batch system"
        )
    global _formed
    own = _own_device(device, environment.local_rank if environment is not None else 0)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        if environment is None:
            # One process: nobody else has to find the store.
            distributed.init_process_group(BACKENDS[device], store=HashStore(), rank=0, world_size=1)
        else:
            with opened_here():
                _meet(environment, own, timeout)
    except (RuntimeError, ValueError) as error:
        raise StrategyError(f"the process group could not be formed: {error}") from error
    _formed = True


def _meet(environment: ProcessEnvironment, own: torch.device, timeout: timedelta | None) -> None:
    if (environment.address is None or environment.port is None) and not _has_store():
        raise StrategyError(
            f"{environment.launcher} does not tell where rank 0 can be reached. Set MASTER_ADDR to its"
            " machine and MASTER_PORT to a free port there, for all ranks"
        )
    method = "env://" if _has_store() else f"tcp://{environment.address}:{environment.port}"
    limit = {} if timeout is None else {"timeout": timeout}
    hosted = _await_started(environment) if started else None
    store, rank, size = next(rendezvous(method, environment.rank, environment.world_size, **limit))
    if environment.attempt:  # torch's agent keeps its store, with what the processes before these left in it
        store = PrefixStore(f"attempt {environment.attempt}", store)
    store.set(_HERE.format(rank), "")
    distributed.init_process_group(
        BACKENDS[own.type],
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=own if own.type == "cuda" else None,
    )
    del hosted  # torch's own store shares the server, and holds it from now on


def _await_started(environment: ProcessEnvironment) -> Store:
    """Wait for the ranks that this process has started: torch would wait for one that has died, too."""
    assert environment.address is not None
    assert environment.port is not None
    store = TCPStore(
        environment.address, environment.port, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    for rank, child in started.items():
        while not store.check([_HERE.format(rank)]):
            for each in started.values():
                _check_runs(each)
            wait_for([child], _LOOKING)
    return store


def _check_runs(child: Child) -> None:
    code = child.poll()
    if code == 0:
        raise RankFailure(
            f"rank {child.rank} ended, with exit code 0, before the process group was formed: does the"
            " program end early, or go another way, on some ranks?"
        )
    if code is not None:
        raise RankFailure(
            f"rank {child.rank} failed first, before the process group was formed: it {ending(code)}"
        )


def _has_store() -> bool:
    # torchrun's agent may host the store itself, which only torch's own reading of the environment knows.
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def uncompared() -> distributed.ProcessGroup | None:
    """A group of all ranks whose collectives torch's debug mode does not compare; None, which is the group of
    the job, outside of that mode.

    For `DistributedDataParallel`, which crashes on a group that compares (torch 2.13, on CPUs). To be called
    by every process.
    """
    level = get_debug_level()
    if level != DebugLevel.DETAIL:
        return None
    set_debug_level(DebugLevel.OFF)
    try:
        with opened_here():
            group: distributed.ProcessGroup = distributed.new_group()
        return group
    finally:
        set_debug_level(level)


def _own_device(kind: str, local_rank: int) -> torch.device:
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def leave(member: Member) -> None:
    """Give back what a member had for itself; the group of the job stays."""
    member.ranks.close()


def _end() -> None:
    """End the process group with the program, and leave word of it for ranks that might wait for this one."""
    if os.getpid() != _process:
        return
    note_end()
    disband()
    # A group that something still holds, such as a wrapped model, is not freed by that. Its threads may not
    # have let go of the last tensors yet, for which they need the interpreter's lock: waiting for it when the
    # interpreter ends aborts the process ("terminate called without an active exception", torch 2.13).
    time.sleep(_LETTING_GO)


def disband() -> None:
    """End the process group that was formed here, if there is one."""
    global _formed
    if _formed and distributed.is_initialized():
        distributed.destroy_process_group()
    _formed = False
