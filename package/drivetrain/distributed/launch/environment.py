"""The launcher of this process, its rank and the world size, read from environment variables."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drivetrain.core.errors import StrategyError

AGAIN = "DRIVETRAIN_AGAIN"
"""Set by our launcher: "1" if it has started the job before, after a failure or a change of machines."""

_PORTS = range(15_000, 30_000)
"""Ports for jobs, picked by the job's number: below those that systems assign themselves."""

_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")

_MPI = {
    "openmpi": tuple(f"OMPI_COMM_WORLD_{each}" for each in _NUMBERS),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI's too
    "mvapich": tuple(f"MV2_COMM_WORLD_{each}" for each in _NUMBERS),
}
"""The variables of MPI's launchers: a process's number, how many there are, and both on this machine."""

SIZES = {"torchrun": "WORLD_SIZE", "slurm": "SLURM_STEP_NUM_TASKS"} | {each: _MPI[each][1] for each in _MPI}
"""Each launcher's variable with the number of processes."""

_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_PORT")
"""Variables that differ between MPI jobs, but not within one."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """This process among those that were started together.

    Attributes:
        launcher: What started them: "torchrun", "slurm", "openmpi", "mpich" or "mvapich".
        address: Rank 0's address; None if the launcher does not give it.
        attempt: How often the launcher has started the processes again after a failure.
        restarts: How often it may do so in all.
        one_machine: Whether the launcher says that all processes are on this machine.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None = None
    port: int | None = None
    attempt: int = 0
    restarts: int = 0
    one_machine: bool = False

    def __post_init__(self) -> None:
        """Check that the numbers are consistent, and that the port is valid."""
        fits = (
            0 <= self.rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and self.local_rank <= self.rank
        )
        if not fits:
            raise StrategyError(
                f"{self.launcher} started this process as rank {self.rank} of {self.world_size}, local rank"
                f" {self.local_rank} of {self.local_world_size}: these numbers are inconsistent. Unset its"
                " environment variables to train in one process"
            )
        lowest = 1 if self.world_size > 1 else 0  # for port 0 the system chooses one that no other rank knows
        if self.port is not None and not lowest <= self.port <= 65_535:
            raise StrategyError(
                f"MASTER_PORT={self.port} in the environment is not a valid port. Set it to one from 1 to"
                " 65535 that is free on rank 0's machine, the same for all ranks"
            )

    @property
    def num_nodes(self) -> int:
        """The number of machines, if each has as many processes as this one."""
        return -(-self.world_size // self.local_world_size)


def detect(environment: Mapping[str, str]) -> ProcessEnvironment | None:
    """Return this process's rank and the job's address from a launcher's variables; None without a launcher.

    torchrun's variables take precedence: `accelerate launch`, `deepspeed` and `drivetrain launch` set them
    too, even inside a batch system's job.
    """
    found = _torchrun(environment) or _slurm(environment)
    return found or next(filter(None, (_mpi(each, environment) for each in _MPI)), None)


def _torchrun(environment: Mapping[str, str]) -> ProcessEnvironment | None:
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    number = _reader("torchrun", environment)
    world_size = number("WORLD_SIZE")
    return ProcessEnvironment(
        "torchrun",
        number("RANK"),
        world_size,
        number("LOCAL_RANK", default=number("RANK")),
        number("LOCAL_WORLD_SIZE", default=world_size),
        environment.get("MASTER_ADDR"),
        number("MASTER_PORT") if "MASTER_PORT" in environment else None,
        number("TORCHELASTIC_RESTART_COUNT", default=0),
        number("TORCHELASTIC_MAX_RESTARTS", default=0),
        # Variables that were set by hand may leave it out.
        one_machine="LOCAL_WORLD_SIZE" in environment and number("LOCAL_WORLD_SIZE") == world_size,
    )


def _slurm(environment: Mapping[str, str]) -> ProcessEnvironment | None:
    # https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. Only a step started by srun
    # has several processes. A batch script and an interactive shell see a job's variables, but are a single
    # process.
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    number = _reader("slurm", environment)
    world_size = number("SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return None
    nodes = number("SLURM_STEP_NUM_NODES", default=1)
    job, step = number("SLURM_JOB_ID", default=0), number("SLURM_STEP_ID")
    return ProcessEnvironment(
        "slurm",
        number("SLURM_PROCID"),
        world_size,
        number("SLURM_LOCALID"),
        -(-world_size // nodes),
        environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        number("MASTER_PORT", default=_PORTS[(job * 31 + step) % len(_PORTS)]),
        one_machine=nodes == 1 and "SLURM_STEP_NUM_NODES" in environment,
    )


def _mpi(launcher: str, environment: Mapping[str, str]) -> ProcessEnvironment | None:
    rank, size, local_rank, local_size = _MPI[launcher]
    # A single process may find the variables of a world of one.
    if rank not in environment or environment.get(size, "1") == "1":
        return None
    number = _reader(launcher, environment)
    world_size = number(size)
    local_world_size = number(local_size, default=world_size)
    is_local = local_world_size == world_size
    return ProcessEnvironment(
        launcher,
        number(rank),
        world_size,
        number(local_rank, default=number(rank)),
        local_world_size,
        *_master_address(launcher, environment, is_local),
        one_machine=is_local and local_size in environment,
    )


def _master_address(
    launcher: str, environment: Mapping[str, str], one_machine: bool
) -> tuple[str | None, int | None]:
    """Return the address and port of MASTER_ADDR and MASTER_PORT, as MPI's launchers set neither.

    On one machine they may be unset. Concurrent runs get different ports from their jobs' names.
    """
    job = next((environment[name] for name in _JOBS if name in environment), "")
    port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if one_machine else None
    if port is not None or "MASTER_PORT" in environment:
        port = _reader(launcher, environment)("MASTER_PORT", default=port)
    return environment.get("MASTER_ADDR", "127.0.0.1" if one_machine else None), port


def _reader(launcher: str, environment: Mapping[str, str]) -> Callable[..., int]:
    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name)
        if text is None and default is not None:
            return default
        if text is None:
            raise StrategyError(f"{launcher} started this process, but {name} is not in its environment")
        if not re.fullmatch(r"\d{1,9}", text.strip()):
            raise StrategyError(f"{name}={text!r} in the environment is not a number; {launcher} sets one")
        return int(text)

    return number


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list of nodes.

    Args:
        nodes: The list, such as "gpu[03-05,9],login1".

    >>> first_host("gpu[03-05,9],login1")
    'gpu03'
    """
    found = re.match(r"([^,\[]*)(?:\[(\d*)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(found.groups("")).strip() if found else ""


def may_start_again() -> bool:
    """Return whether a launcher may start this program again after a failure."""
    found = detect(os.environ)
    return found is not None and (found.restarts > 0 or AGAIN in os.environ)


def is_started_again() -> bool:
    """Return whether this process's launcher has started the program before, as far as it says so.

    torch's agent reports only failures, ours also machines that have come or gone. The launcher on a new
    machine knows of neither, so all ranks must be asked.
    """
    found = detect(os.environ)
    return found is not None and may_start_again() and (found.attempt > 0 or os.environ.get(AGAIN) == "1")
