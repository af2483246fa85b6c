"""Joining the processes of a job into one process group, and leaving it again."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from drivetrain.distributed.environment import ProcessEnvironment, detect
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import StrategyError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What connects the processes, by the kind of device that their tensors are on."""


_formed = False


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
    """
    environment = detect(os.environ)
    if not distributed.is_initialized():
        _connect(environment, world_size, device, timeout)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size != world_size:
        raise StrategyError(
            f"the process group has {size} processes, and this run asks for {world_size}. Give devices and"
            " num_nodes that multiply to the number that the launcher started"
        )
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
            _meet(environment, own, timeout)
    except (RuntimeError, ValueError) as error:
        raise StrategyError(f"the process group could not be formed: {error}") from error
    _formed = True
    atexit.register(disband)


def _meet(environment: ProcessEnvironment, own: torch.device, timeout: timedelta | None) -> None:
    distributed.init_process_group(
        BACKENDS[own.type],
        init_method="env://" if _has_store() else f"tcp://{environment.address}:{environment.port}",
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=own if own.type == "cuda" else None,
    )


def _has_store() -> bool:
    # torchrun's agent may host the store itself, which only torch's own reading of the environment knows.
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def _own_device(kind: str, local_rank: int) -> torch.device:
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def leave(member: Member) -> None:
    """Give back what a member had for itself; the group of the job stays."""
    member.ranks.close()


def disband() -> None:
    """End the process group that was formed here, if there is one."""
    global _formed
    if _formed and distributed.is_initialized():
        distributed.destroy_process_group()
    _formed = False
