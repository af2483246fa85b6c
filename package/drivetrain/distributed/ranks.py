"""The processes of a job, and the few things that they do together on the host; alone, identities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from drivetrain.distributed.sockets import opened_here
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that act together, and which of them this one is.

    Every method must be called by all of them, in the same order. What they exchange is small (names, sizes,
    errors) and goes through the host's memory.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
        group: Their process group; None where there is one process.
        siblings: What `sibling` and `grouped` made.
        copies: Of how many neighbouring processes, that all have the same, the first one's counts.
        copy: Which of these this process is.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    siblings: list[Ranks] = field(default_factory=list, compare=False, repr=False)
    copies: int = 1
    copy: int = 0

    @classmethod
    def of_job(cls) -> Ranks:
        """All processes of the job, with a group of their own, so that a background thread may use it too.

        To be called by every process. Without an initialised process group it is this process alone.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        if distributed.get_world_size() == 1:
            return cls()
        # gloo, because what is exchanged is on the host, and the accelerator's stream is not to wait for it.
        with opened_here():
            group = distributed.new_group(backend="gloo")
        return cls(distributed.get_rank(), distributed.get_world_size(), group)

    def sibling(self) -> Ranks:
        """The same processes in another group, for what happens beside what is done in this one."""
        if self.alone:
            return self
        members = torch.distributed.get_process_group_ranks(self.group)
        with opened_here():
            group = torch.distributed.new_group(members, backend="gloo")
        self.siblings.append(replace(self, group=group, siblings=[]))
        return self.siblings[-1]

    def grouped(self, copies: int) -> Ranks:
        """The same processes, of which as many neighbours as `copies` says have the same and count as one.

        All of them still take part, so that each gets the same to the last bit, whichever group it is in.
        """
        if copies == 1:
            return self
        size, (rank, copy) = self.size // copies, divmod(self.rank, copies)
        self.siblings.append(Ranks(rank, size, self.group, copies=copies, copy=copy))
        return self.siblings[-1]

    @property
    def alone(self) -> bool:
        """Whether there is no other process to exchange anything with."""
        return self.size * self.copies == 1

    def close(self) -> None:
        """End the group, and those of its siblings; whoever still has these ranks has no group to use.

        An object of a group that outlives it, in a reference that somebody keeps, would stop a copy of this
        process (a fork) that drops it: the group's threads are not in the copy.
        """
        for each in (*self.siblings, self):
            shared = each is not self and each.group is self.group
            if each.group is not None and not shared and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group(each.group)
            object.__setattr__(each, "group", None)

    @property
    def _is_first(self) -> bool:
        return self.rank == 0 and self.copy == 0

    def all_gather(self, value: T) -> list[T]:
        """The values of all, in the order of their ranks."""
        return self._of_each(value)[:: self.copies]

    def _of_each(self, value: T) -> list[T]:
        if self.alone:
            return [value]
        values: list[Any] = [None] * (self.size * self.copies)
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks; the same on each, to the last bit."""
        if self.alone:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        if self.copy:
            sums.zero_()
        torch.distributed.all_reduce(sums, group=self.group)
        summed: list[float] = sums.tolist()
        return summed

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over these ranks, in place: where it is, without a wait for the device."""
        if self.copy:
            tensor.zero_()
        if not self.alone:
            # An accelerator's tensor goes over the job's own group, whose back end needs no copy to the host.
            is_job = torch.distributed.get_world_size() == self.size * self.copies
            on_host = tensor.device.type == "cpu"
            torch.distributed.all_reduce(tensor, group=None if is_job and not on_host else self.group)
        return tensor

    def first(self, act: Callable[[], T]) -> T:
        """What rank 0 gets from `act`; the others only wait for it.

        Raises:
            Exception: `act` raised; every rank raises it.
        """
        value: Any
        value, error = _attempt(act) if self._is_first else (None, None)
        if not self.alone:
            outcome = [value, _sendable(error)]
            torch.distributed.broadcast_object_list(outcome, group=self.group, group_src=0)
            if not self._is_first:
                value, error = outcome
        if error is not None:
            raise error
        result: T = value
        return result

    def together(self, act: Callable[[], T]) -> list[T]:
        """What every rank gets from `act`, once all have ended it.

        Raises:
            Exception: One raised. Every rank raises: its own error, or that of the first that has one.
        """
        mine, error = _attempt(act)
        outcomes = self._of_each((mine, _sendable(error)))
        if error is not None:
            raise error
        for rank, (_, theirs) in enumerate(outcomes):
            if theirs is not None:
                theirs.add_note(f"drivetrain: this happened on rank {rank}")
                raise theirs
        return [each for each, _ in outcomes][:: self.copies]

    def distribute(self, value: T, divide: Callable[[list[T]], list[T]]) -> T:
        """Rank 0 is given the values of all, and gives one back to each.

        Raises:
            Exception: `divide` raised; every rank raises it.
        """
        if self.alone:
            return divide([value])[0]
        processes = self.size * self.copies
        gathered: list[Any] | None = [None] * processes if self._is_first else None
        torch.distributed.gather_object(value, gathered, group=self.group, group_dst=0)
        outcomes: list[Any] | None = None
        if gathered is not None:
            values, error = _attempt(lambda: divide(gathered[:: self.copies]))
            outcomes = [(None, _sendable(error))] * processes
            if error is None:
                outcomes = [(each, None) for each in values for _ in range(self.copies)]
        mine: list[Any] = [None]
        torch.distributed.scatter_object_list(mine, outcomes, group=self.group, group_src=0)
        given, error = mine[0]
        if error is not None:
            raise error
        result: T = given
        return result


ALONE = Ranks()
"""The only process."""


def _attempt(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What came of it: the value, or the error that the others are to hear of before it is raised."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def _sendable(error: Exception | None) -> Exception | None:
    """An error that surely reaches the other ranks: one that cannot be sent would leave them waiting."""
    if error is None or (
        isinstance(error, (DrivetrainError, OSError))
        and all(isinstance(each, (str, int)) for each in error.args)
    ):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
