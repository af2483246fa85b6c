"""Which process writes, and reads, which part of a tensor.

With several processes that is decided by the planners of torch.distributed.checkpoint
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html): they know `DTensor`s in all their
placements, write what is replicated once, spread over the ranks by size, and find what a rank needs of boxes
that were cut otherwise. Only its planners are used: its own storage unpickles. A process alone has nothing to
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from drivetrain.checkpoint.format import Part
from drivetrain.checkpoint.records import Piece, TensorRecord
from drivetrain.checkpoint.tensors import CODES, DTYPES, check_tensor
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

Groups: TypeAlias = Mapping[str, Mapping[str, Tensor]]


Parts: TypeAlias = dict[str, dict[str, Part]]
"""Group to name to part; names of which this process writes nothing are absent."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`: one of which each process holds a part, or a copy."""
    # By name, because importing the class takes half a second that a process alone need not spend.
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed.")


def plan_parts(tensors: Groups, unshared: Collection[str], ranks: Ranks) -> Parts:
    """Divide the writing among the processes; to be called by all of them.

    Args:
        tensors: Group to name to tensor: `DTensor`s, of which each process writes its own shard, and plain
            ones, the same on every process, of which each is written by one of them.
        unshared: Groups that are not the same on every process; rank 0 writes its own.
        ranks: The processes.

    Raises:
        CheckpointError: A tensor that cannot be stored, or tensors that differ between the processes.
    """
    parts: Parts = {group: {} for group in tensors}
    shared: dict[str, Tensor] = {}
    for group, named in tensors.items():
        for name, tensor in named.items():
            # An empty tensor has no part that could be anyone's.
            if ranks.size > 1 and group not in unshared and tensor.numel():
                shared[f"{group}/{name}"] = tensor
            elif ranks.rank == 0:
                check_tensor(tensor, f"the group {group!r}, {name!r}")
                empty = is_sharded(tensor) and not tensor.numel()
                parts[group][name] = _whole(
                    torch.empty(tensor.shape, dtype=tensor.dtype) if empty else _local(tensor)
                )
    if ranks.size > 1:
        for key, part in _planned(shared, ranks).items():
            group, _, name = key.partition("/")
            parts[group][name] = part
    return parts


def _local(tensor: Tensor) -> Tensor:
    if not is_sharded(tensor):
        return tensor.detach()
    # A mesh of one process: its shard is the whole.
    sharded: Any = tensor
    local: Tensor = sharded.to_local().detach()
    if local.shape != tensor.shape:
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} is sharded, but the process that saves it is alone"
        )
    return local


def _whole(tensor: Tensor) -> Part:
    return Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape))


def _planned(shared: dict[str, Tensor], ranks: Ranks) -> dict[str, Part]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    proposal: list[SavePlan] = []

    def propose() -> None:
        for key, tensor in shared.items():
            check_tensor(tensor, key)
        planner.set_up_planner(shared, None, is_coordinator=ranks.rank == 0)
        proposal.append(planner.create_local_plan())

    def divide(proposals: list[tuple[SavePlan, tuple[Any, ...]]]) -> list[Any]:
        first = proposals[0][1]
        for rank, (_, described) in enumerate(proposals):
            if described != first:
                differing = sorted(set(described) ^ set(first))[:6]
                raise CheckpointError(
                    f"rank {rank} saves other tensors than rank 0: {', '.join(map(str, differing))}"
                )
        try:
            plans, _ = planner.create_global_plan([plan for plan, _ in proposals])
        except (ValueError, AssertionError) as error:
            raise CheckpointError(f"the processes' tensors do not fit together: {error}") from error
        return plans

    ranks.together(propose)
    described = tuple(f"{key}: {CODES[each.dtype]}{list(each.shape)}" for key, each in shared.items())
    mine: Any = ranks.distribute((proposal[0], described), divide)
    parts = {}
    for item in planner.finish_plan(mine).items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        tensor: Tensor = planner.resolve_data(item)  # type: ignore[assignment]
        if tensor.numel():  # an uneven split leaves some ranks without rows
            parts[item.index.fqn] = Part(tensor, tuple(chunk.offsets), tuple(shared[item.index.fqn].shape))
    return parts


@dataclass(frozen=True, slots=True)
class Fetch:
    """A box of a stored piece, and the tensor that it fills.

    Attributes:
        name: The tensor's name.
        piece: Where the piece lies.
        start: Where the box begins in the piece, by dimension.
        target: A view of the destination, of the box's shape.
    """

    name: str
    piece: Piece
    start: tuple[int, ...]
    target: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether the box is all of the piece."""
        return tuple(self.target.shape) == self.piece.shape


Like: TypeAlias = Callable[[str, str, tuple[int, ...]], Tensor | None]
"""Given group, name and shape of a stored tensor: one that is sharded as the result is to be, or None."""


def plan_reads(
    records: Mapping[str, TensorRecord], group: str, like: Like | None, room: Callable[[str], Tensor]
) -> tuple[dict[str, Tensor], list[Fetch]]:
    """The tensors to be filled, and from what.

    Args:
        records: Name to where the tensor lies.
        group: Their group.
        like: Says how a tensor is sharded; one that is not is read whole.
        room: Makes an uninitialised whole tensor, by name.

    Returns:
        The tensors, by name, with nothing in them yet; and what is to be read into them.

    Raises:
        CheckpointError: A tensor has another shape here than there.
    """
    results: dict[str, Tensor] = {}
    sharded: dict[str, Tensor] = {}
    fetches: list[Fetch] = []
    for name, record in records.items():
        pattern = like(group, name, record.shape) if like is not None else None
        if pattern is None or not is_sharded(pattern):
            whole = results[name] = room(name)
            for piece in record.pieces:
                box = tuple(map(slice, piece.offset, _ends(piece)))
                fetches.append(Fetch(name, piece, (0,) * len(piece.shape), whole[box]))
            continue
        if tuple(pattern.shape) != record.shape:
            raise CheckpointError(
                f"{name!r} has shape {list(record.shape)} in the checkpoint, {list(pattern.shape)} here"
            )
        results[name] = sharded[name] = torch.empty_like(pattern, dtype=DTYPES[record.dtype])
    return results, fetches + (_sharded_fetches(sharded, records) if sharded else [])


def _ends(piece: Piece) -> tuple[int, ...]:
    return tuple(start + length for start, length in zip(piece.offset, piece.shape, strict=True))


def _sharded_fetches(sharded: dict[str, Tensor], records: Mapping[str, TensorRecord]) -> list[Fetch]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    described = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[records[name].dtype]),
            size=torch.Size(records[name].shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
                for piece in records[name].pieces
            ],
        )
        for name in sharded
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(sharded), Metadata(described), is_coordinator=False)  # type: ignore[arg-type]
    pieces = {(name, piece.offset): piece for name in sharded for piece in records[name].pieces}
    fetches = []
    for item in planner.create_local_plan().items:
        name = item.storage_index.fqn
        piece = pieces[name, tuple(item.storage_index.offset or ())]
        target = planner.resolve_tensor(item)
        if math.prod(item.lengths):
            fetches.append(Fetch(name, piece, tuple(item.storage_offsets), target))
    return fetches
