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

_SIZE = 8
"""Bytes of a message's size, which travels with its beginning."""

_SHORT = 1016
"""Bytes of a message that needs one exchange."""


@dataclass(frozen=True)
class Ranks:
    """A group of processes that act together, as seen by one of them.

    All of them must call every method, in the same order. They exchange small things (names, sizes, errors)
    through the host's memory.

    Attributes:
        rank: This process, from 0.
        size: The number of processes.
        group: Their process group; None with one process.
        siblings: The objects that `sibling` and `grouped` returned.
        copies: How many neighbouring processes hold the same values; only the first of them contributes
            values.
        copy: The number of this process among these neighbours, from 0.
        order: The calls made so far, which must be the same on all these processes; each gathering compares
            them.
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
        """Return the same processes, where `copies` neighbours, which hold the same values, count as one.

        All of them still take part, so that every process gets the same result to the last bit.
        """
        if copies == 1 or self.alone:
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
        found = self._gathered(_encoded(value, self.order.digest if compares else None))
        digests = {digest for digest, _ in found}
        if len(digests) > 1 and None not in digests:
            raise unequal_calls(self._of_each(self.order.recent(), compares=False))
        return [each for _, each in found]

    def gather_first(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in rank order, on rank 0; None on the others."""
        if self.alone:
            return [value]
        data = _encoded(value)
        size = torch.tensor([data.numel()])
        longest = int(self._max(size.clone()))
        sent = torch.cat([size.view(torch.uint8), torch.nn.functional.pad(data, (0, longest - data.numel()))])
        received = [torch.empty_like(sent) for _ in range(self.size * self.copies)] if self.is_first else None
        torch.distributed.gather(sent, received, group=self.group, group_dst=0)
        if received is None:
            return None
        sizes = [int(each[:_SIZE].view(torch.int64)) for each in received]
        return [each for _, each in _read([each[_SIZE:] for each in received], sizes)][:: self.copies]

    def compare_calls(self) -> None:
        """Check that all ranks have made the same calls; see `order`. One small sum, however many they are.

        Raises:
            StrategyError: They have not.
        """
        if self.alone:
            return
        digest = self.order.digest
        both = self._max(torch.tensor([digest, -digest]))
        if int(both[0]) != -int(both[1]):
            raise unequal_calls(self._of_each(self.order.recent(), compares=False))

    def _max(self, numbers: Tensor) -> Tensor:
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=self.group)
        return numbers

    def _gathered(self, data: Tensor) -> list[tuple[int | None, Any]]:
        """Return the order and the value that each rank has sent.

        The first bytes travel with the size; what is longer on any rank takes a second exchange.
        """
        head = _head(data)
        heads = [torch.empty_like(head) for _ in range(self.size * self.copies)]
        torch.distributed.all_gather(heads, head, group=self.group)
        sizes = [int(each[:_SIZE].view(torch.int64)) for each in heads]
        parts = [each[_SIZE:] for each in heads]
        longest = max(sizes) - _SHORT
        if longest > 0:
            rest = data[_SHORT:]
            rest = torch.nn.functional.pad(rest, (0, longest - rest.numel()))
            rests = [torch.empty_like(rest) for _ in sizes]
            torch.distributed.all_gather(rests, rest, group=self.group)
            parts = [torch.cat(each) for each in zip(parts, rests, strict=True)]
        return _read(parts, sizes)

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
            data = _encoded((value, _sendable(error))) if self.is_first else torch.empty(0, dtype=torch.uint8)
            head = _head(data)
            torch.distributed.broadcast(head, group=self.group, group_src=0)
            size = int(head[:_SIZE].view(torch.int64))
            rest = data[_SHORT:] if self.is_first else torch.empty(max(size - _SHORT, 0), dtype=torch.uint8)
            if rest.numel():
                torch.distributed.broadcast(rest, group=self.group, group_src=0)
            outcome = _read([torch.cat([head[_SIZE:], rest])], [size])[0][1]
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


def _head(data: Tensor) -> Tensor:
    """Return the size of what is sent and its first bytes, filled up to the same length on all ranks."""
    first = data[:_SHORT]
    size = torch.tensor([data.numel()], dtype=torch.int64).view(torch.uint8)
    return torch.cat([size, torch.nn.functional.pad(first, (0, _SHORT - first.numel()))])


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
