"""The processes of a job and their collectives on the host; with one process they do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from drivetrain.core.errors import CheckpointError, ConfigError, DrivetrainError
from drivetrain.distributed.call_order import CallOrder, unequal_calls
from drivetrain.distributed.processes import is_grouped, local_rank
from drivetrain.distributed.sockets import closing_sockets_in_forks
from drivetrain.distributed.wire import decode, encode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A group of processes that act together, as seen by one of them.

    All of them must call every method, in the same order. They exchange small things (names, sizes, errors)
    through the host's memory.

    Attributes:
        rank: This process, from 0.
        size: The number of processes.
        group: Their process group; None with one process.
        siblings: What `sibling` and `grouped` returned.
        copies: The number of neighbouring processes that hold the same values; only the first one's count.
        copy: This process's number among these neighbours.
        order: The calls that all these processes make in one order. Each gathering compares them.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    siblings: list[Ranks] = field(default_factory=list, compare=False, repr=False)
    copies: int = 1
    copy: int = 0
    order: CallOrder = field(default_factory=CallOrder, compare=False, repr=False)

    @classmethod
    def of_job(cls) -> Ranks:
        """Return all processes of the job, in a new group, so that a background thread may use it too.

        Every process must call it. Without an initialised process group it returns this process alone.
        """
        distributed = torch.distributed
        if not is_grouped() or distributed.get_world_size() == 1:
            return cls()
        # gloo, because the values are on the host and the accelerator's stream must not wait for them.
        with closing_sockets_in_forks():
            group = distributed.new_group(backend="gloo")
        return cls(distributed.get_rank(), distributed.get_world_size(), group)

    def sibling(self) -> Ranks:
        """Return the same processes in a second group, for collectives that run at the same time."""
        if self.alone:
            return self
        members = torch.distributed.get_process_group_ranks(self.group)
        with closing_sockets_in_forks():
            group = torch.distributed.new_group(members, backend="gloo")
        self.siblings.append(replace(self, group=group, siblings=[], order=CallOrder()))
        return self.siblings[-1]

    def grouped(self, copies: int) -> Ranks:
        """Return the same processes, where `copies` neighbours hold the same values and count as one.

        All of them still take part, so that every process gets the same result to the last bit.
        """
        if copies == 1:
            return self
        size, (rank, copy) = self.size // copies, divmod(self.rank, copies)
        self.siblings.append(replace(self, rank=rank, size=size, siblings=[], copies=copies, copy=copy))
        return self.siblings[-1]

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.size * self.copies == 1

    def close(self) -> None:
        """End the group and those of its siblings; these ranks cannot be used afterwards.

        If some reference keeps a group alive, a fork of this process that drops that reference hangs: the
        group's threads do not exist in the fork.
        """
        for each in (*self.siblings, self):
            shared = each is not self and each.group is self.group
            if each.group is not None and not shared and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group(each.group)
            object.__setattr__(each, "group", None)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of all."""
        return self.rank == 0 and self.copy == 0

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order.

        Raises:
            StrategyError: The ranks have made different calls; see `order`.
        """
        return self._of_each(value)[:: self.copies]

    def _of_each(self, value: T, compares: bool = True) -> list[T]:
        if self.alone:
            return [value]
        data, sizes = self._measured(value, self.order.digest if compares else None)
        parts = [torch.empty_like(data) for _ in sizes]
        torch.distributed.all_gather(parts, data, group=self.group)
        found = _read(parts, sizes)
        digests = {digest for digest, _ in found}
        if len(digests) > 1 and None not in digests:
            raise unequal_calls(self._of_each(self.order.recent(), compares=False))
        return [each for _, each in found]

    def _measured(self, value: Any, digest: int | None) -> tuple[Tensor, list[int]]:
        """Return what is sent of a value, filled up to the longest of all ranks, and the sizes of all."""
        data = _encoded(value, digest)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size * self.copies)]
        torch.distributed.all_gather(sizes, torch.tensor([data.numel()]), group=self.group)
        counts = [int(each) for each in sizes]
        return torch.nn.functional.pad(data, (0, max(counts) - data.numel())), counts

    def gather_first(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in rank order, on rank 0; None on the others."""
        if self.alone:
            return [value]
        data, sizes = self._measured(value, None)
        parts = [torch.empty_like(data) for _ in sizes] if self.is_first else None
        torch.distributed.gather(data, parts, group=self.group, group_dst=0)
        return None if parts is None else [each for _, each in _read(parts, sizes)][:: self.copies]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, equal on each to the last bit."""
        if self.alone:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        if self.copy:
            sums.zero_()
        torch.distributed.all_reduce(sums, group=self.group)
        summed: list[float] = sums.tolist()
        return summed

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over these ranks, in place and on its device, without a host sync."""
        if self.copy:
            tensor.zero_()
        if not self.alone:
            torch.distributed.all_reduce(tensor, group=self._group_for(tensor))
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the largest value of each element over these ranks, in place, as `add` sums them."""
        if not self.alone:
            operation = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(tensor, operation, group=self._group_for(tensor))
        return tensor

    def _group_for(self, tensor: Tensor) -> ProcessGroup | None:
        # An accelerator's tensor uses the job's group, whose back end needs no copy to the host.
        is_job = torch.distributed.get_world_size() == self.size * self.copies
        return None if is_job and tensor.device.type != "cpu" else self.group

    def first(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0 and return its result on all ranks; the others only wait.

        Raises:
            Exception: `act` raised; every rank raises its error.
        """
        value: Any
        value, error = _attempt(act) if self.is_first else (None, None)
        if not self.alone:
            data = _encoded((value, _sendable(error))) if self.is_first else torch.empty(0)
            size = torch.tensor([data.numel()])
            torch.distributed.broadcast(size, group=self.group, group_src=0)
            data = data if self.is_first else torch.empty(int(size), dtype=torch.uint8)
            torch.distributed.broadcast(data, group=self.group, group_src=0)
            outcome = _read([data], [int(size)])[0][1]
            if not self.is_first:
                value, error = outcome
        if error is not None:
            raise error
        result: T = value
        return result

    def in_turn(self, act: Callable[[], object]) -> None:
        """Run `act` on every rank, on one rank of a machine at a time; return once all have finished.

        Raises:
            Exception: As `together`.
        """
        if self.alone:
            act()
            return
        own = local_rank()
        for turn in range(max(self._of_each(own)) + 1):
            self.together(act if turn == own else lambda: None)

    def together(self, act: Callable[[], T]) -> list[T]:
        """Run `act` on every rank and return all results, once all ranks have finished.

        Raises:
            Exception: `act` raised on some rank. A rank raises its own error, or else the first rank's.
        """
        with self.jointly() as joint:
            joint.mine = act()
        return joint.of_all

    @contextmanager
    def jointly(self) -> Iterator[Joint]:
        """Run a block on every rank: its end waits for all, as `together` does, except after an interrupt."""
        joint = Joint()
        try:
            yield joint
        except Exception as error:
            self._of_each((None, _sendable(error)), compares=False)
            raise
        outcomes = self._of_each((joint.mine, None))
        for rank, (_, theirs) in enumerate(outcomes):
            if theirs is not None:
                theirs.add_note(f"drivetrain: this happened on rank {rank}")
                raise theirs
        joint.of_all = [each for each, _ in outcomes][:: self.copies]


@dataclass
class Joint:
    """The results of a block that every rank runs: this rank's, and at its end those of all."""

    mine: Any = None
    of_all: list[Any] = field(default_factory=list)


ALONE = Ranks()
"""One process without others."""


def _attempt(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of `act`, or its error, which the other ranks must get before it is raised."""
    try:
        return act(), None
    except Exception as error:
        return None, error


def _sendable(error: Exception | None) -> Exception | None:
    """Return an error that can be sent: its text alone, if the other ranks may not know its class."""
    if isinstance(error, (DrivetrainError, OSError)):
        with suppress(CheckpointError):
            encode(error)
            return error
    return None if error is None else RuntimeError(f"{type(error).__name__}: {error}")


def _encoded(value: Any, digest: int | None = None) -> Tensor:
    """Return the bytes of a value or, for one that cannot be sent, of an error that all ranks raise."""
    try:
        data = encode({"order": digest, "value": value})
    except CheckpointError as error:
        data = encode({"order": digest, "problem": str(error)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[int | None, Any]]:
    """Return what ranks have sent: the digest and the value of each.

    Raises:
        ConfigError: One of them has a value that cannot be sent.
    """
    found = [decode(each[:size].numpy().tobytes()) for each, size in zip(parts, sizes, strict=True)]
    problem = next((each["problem"] for each in found if "problem" in each), None)
    if problem is not None:
        raise ConfigError(
            f"several processes have to exchange a value, and it cannot be sent: {problem}. Allowed too are"
            " data classes, named tuples and containers whose classes a module defines"
        )
    return [(each["order"], each["value"]) for each in found]
