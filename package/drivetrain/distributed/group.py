"""Join the processes of a job into one process group, and leave it again."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import DebugLevel, HashStore, PrefixStore, get_debug_level, set_debug_level

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed.interfaces import GLOO
from drivetrain.distributed.launch.children import ending, siblings, started
from drivetrain.distributed.launch.environment import SIZES, ProcessEnvironment, detect
from drivetrain.distributed.launch.meeting import HOSTED, Meeting
from drivetrain.distributed.launch.rendezvous import gather, note_end
from drivetrain.distributed.processes import has_fake_ranks
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.distributed.secret import authenticate
from drivetrain.distributed.sockets import closing_sockets_in_forks, open_more_files

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The back end by the kind of device that the tensors are on."""

_CUDA_LIMIT = timedelta(minutes=10)
"""NCCL's own limit of a collective. torch gives gloo's, of 30 minutes, to a group that has both."""

_LIMIT = timedelta(minutes=30)
"""The limit of the store, and torch's own of a collective on CPUs."""

_LETTING_GO = 0.02
"""Seconds that other threads get at the end to take the interpreter's lock."""

_ENDED_EARLY = (
    "{} ended with exit code 0 before the process group was formed: does the program end early, or take"
    " another branch, on some ranks?"
)

_formed = False
_failed = False
_bound: torch.device | None = None
"""The GPU that the process group was formed for."""
_process = 0
"""The pid of the process that joined; a fork has the same memory and another pid."""


@dataclass(frozen=True)
class Member:
    """This process as a member of a job."""

    rank: int
    world_size: int
    device: torch.device
    ranks: Ranks


def join(world_size: int, device: str, timeout: timedelta | None = None) -> Member:
    """Join the process group of the job that the environment describes, or use the one that exists already.

    A group that is formed here stays for later runs, until the program ends or `disband` is called: another
    group at the same address would find the first one's leftovers in the store.

    Args:
        timeout: How long a collective may take; None uses torch's limit, which is 10 minutes on GPUs and 30
            on CPUs.
    """
    global _process
    if has_fake_ranks():
        return Member(0, world_size, torch.device(device), ALONE)
    environment = detect(os.environ)
    forms = not distributed.is_initialized()
    if forms:
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
        if not forms:  # otherwise all have just met
            gather(rank, size)
        authenticate(rank, size)
    local = environment.local_rank if environment is not None else rank
    ranks = Ranks.of_job() if size > 1 else ALONE
    own = own_device(device, local)
    if own.type == "cuda":  # also where the user has formed the group
        torch.cuda.set_device(own)
    return Member(rank, size, own, ranks)


def _connect(
    environment: ProcessEnvironment | None, world_size: int, device: str, timeout: timedelta | None
) -> None:
    if environment is None and world_size > 1:
        raise StrategyError(
            f"this run of {world_size} processes has only this one. Start the others with the Trainer,"
            " `drivetrain launch`, torchrun or a batch system"
        )
    global _formed, _bound
    own = own_device(device, environment.local_rank if environment is not None else 0)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        if environment is None:
            # With one process, no other needs to find the store.
            distributed.init_process_group(BACKENDS[device], store=HashStore(), rank=0, world_size=1)
        else:
            open_more_files()
            with closing_sockets_in_forks():
                _meet(environment, own, timeout)
    except (RuntimeError, ValueError) as error:
        advice = ""
        if environment is not None and not environment.one_machine:
            advice = (
                f"each process connects to all others, at the interface that {GLOO} names on each machine;"
                f" here it is {os.environ.get(GLOO)!r}. Set it to the interface by which the other machines"
                " reach this one. "
            )
        raise StrategyError(f"the process group could not be formed: {advice}{error}") from error
    _formed = True
    _bound = own if own.type == "cuda" else None


def _meet(environment: ProcessEnvironment, own: torch.device, timeout: timedelta | None) -> None:
    if environment.address is None or environment.port is None:
        raise StrategyError(
            f"{environment.launcher} does not say how to reach rank 0. Set MASTER_ADDR to its machine and"
            " MASTER_PORT to a free port there, on all ranks"
        )
    rank, size = environment.rank, environment.world_size
    meeting = Meeting(
        rank,
        size,
        environment.address,
        environment.port,
        asked_by=SIZES[environment.launcher],
        one_machine=environment.one_machine,
        is_hosted=os.environ.get(HOSTED) == str(True),
        says=environment.local_rank == 0,
    )
    store = meeting.store(_LIMIT if timeout is None else timeout)
    if environment.attempt:  # torch's agent keeps its store, with the keys of earlier attempts
        store = PrefixStore(f"attempt {environment.attempt}", store)
    # The ranks that this process has started are waited for as long as they run.
    meeting.wait(store, _check_started, math.inf if started else None)
    distributed.init_process_group(
        BACKENDS[own.type],
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=size,
        timeout=_CUDA_LIMIT if timeout is None and own.type == "cuda" else timeout,
        device_id=own if own.type == "cuda" else None,
    )
    if not environment.one_machine:  # gloo connects in the first exchange
        distributed.all_reduce(torch.zeros(1))


def _check_started() -> None:
    for each in started.values():
        code = each.poll()
        if code == 0:
            raise RankFailure(_ENDED_EARLY.format(f"rank {each.rank}"))
        if code is not None:
            raise RankFailure(
                f"rank {each.rank} failed first, before the process group was formed: it {ending(code)}"
            )
    # The launcher ends all ranks when one has failed, but not when one has ended well.
    found, running = detect(os.environ), siblings()
    if found is not None and 0 < len(running) < found.local_world_size:
        raise RankFailure(_ENDED_EARLY.format("a rank of this machine"))


def uncompared() -> distributed.ProcessGroup | None:
    """Return a group of all ranks whose collectives torch's debug mode does not compare.

    Outside that mode it returns None, which means the job's group. `DistributedDataParallel` needs it: it
    crashes on a group that compares (torch 2.13, on CPUs). Every process must call it.
    """
    level = get_debug_level()
    if level != DebugLevel.DETAIL:
        return None
    set_debug_level(DebugLevel.OFF)
    try:
        with closing_sockets_in_forks():
            group: distributed.ProcessGroup = distributed.new_group()
        return group
    finally:
        set_debug_level(level)


def own_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a process, by its local rank."""
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def leave(member: Member) -> None:
    """Close a member's own groups; the job's group stays. For strategies of other packages."""
    member.ranks.close()


def _end() -> None:
    """End the process group with the program, and note it for ranks that might wait for this one."""
    if os.getpid() != _process:
        return
    note_end()
    if hasattr(sys, "last_value"):  # the program ends by an error
        note_failure()
    disband()
    # A group that some object still holds, such as a wrapped model, is not freed by that. Its threads may
    # still have to free their last tensors, for which they need the interpreter's lock. If they wait for it
    # while the interpreter ends, the process aborts ("terminate called without an active exception", torch
    # 2.13).
    time.sleep(_LETTING_GO)


def note_failure() -> None:
    global _failed
    _failed = True


def disband() -> None:
    """End the process group that was formed here, if there is one."""
    global _formed, _bound
    # After a failure NCCL may wait half an hour for collectives that will never end. Left alone, the group
    # aborts them when the interpreter ends it.
    is_left = _failed and _bound is not None
    if _formed and distributed.is_initialized() and not is_left:
        distributed.destroy_process_group()
    _formed, _bound = False, None
