"""Which process writes which part of a tensor, and which box of it a process reads.

The placement of a `DTensor` on its mesh says which box each process holds, so rank 0 plans for all and only
its plan is exchanged: a layout for each tensor, whose size does not grow with the number of processes. Each
process then takes its own pieces out of the plan, and checks that they are what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from drivetrain.checkpoint.format import Plan
from drivetrain.checkpoint.records import MAX_PIECES, MAX_PROCESSES, Cells, Cut, Layout, TensorRecord, cells
from drivetrain.checkpoint.tensors import CODES, check_tensor
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import CheckpointError

Groups: TypeAlias = Mapping[str, Mapping[str, Tensor]]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape, by dimension."""

Like: TypeAlias = Callable[[str, str, tuple[int, ...]], Tensor | None]
"""Given group, name and shape of a stored tensor: a tensor sharded as the result shall be, or None."""

_Key: TypeAlias = tuple[str, str]
"""Group and name."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`: one of which each process holds a part, or a copy."""
    # By name, because importing the class takes half a second that a process alone need not spend.
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed.")


def local_box(tensor: Any) -> Box:
    """The box of a `DTensor` that this process holds; one without elements where it holds nothing."""
    local = tensor.to_local()
    if not local.numel():
        return (0,) * local.ndim, tuple(local.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def plan_save(tensors: Groups, unshared: Collection[str], ranks: Ranks) -> Plan:
    """Divide the writing among the processes; to be called by all of them.

    Args:
        tensors: Group to name to tensor. Each process writes its own shard of a `DTensor`. A plain tensor is
            the same on every process, and one of them writes it.
        unshared: Groups that are not the same on every process; rank 0 writes its own.
        ranks: The processes.

    Raises:
        CheckpointError: A tensor that cannot be stored, or tensors that differ between the processes.
    """
    shared: dict[_Key, Tensor] = {}
    plan = Plan({group: {} for group in tensors}, {group: {} for group in tensors}, ranks.size)
    for group, named in tensors.items():
        for name, tensor in named.items():
            # An empty tensor has no part that could be anyone's.
            if ranks.size > 1 and group not in unshared and tensor.numel():
                shared[group, name] = tensor
            elif ranks.rank == 0:
                check_tensor(tensor, f"the group {group!r}, {name!r}")
                plan.records[group][name] = TensorRecord(_whole(tensor))
                plan.parts[group][name] = _alone(tensor)
    if ranks.size > 1:
        records = ranks.first(lambda: divide(shared, ranks.size))
        ranks.together(lambda: _take(shared, records, plan, ranks.rank))
        for group, named in tensors.items():
            order = [name for name in named if name in plan.records[group]]
            plan.records[group].update({name: plan.records[group].pop(name) for name in order})
    return plan


def _whole(tensor: Tensor) -> Layout:
    return Layout.whole(CODES[tensor.dtype], tuple(tensor.shape))


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that one process writes whole."""
    if not is_sharded(tensor):
        return tensor.detach()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    # A mesh of one process: its shard is the whole.
    sharded: Any = tensor
    local: Tensor = sharded.to_local().detach()
    if local.shape != tensor.shape:
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} is sharded, but the process that saves it is alone"
        )
    return local


def divide(tensors: Mapping[_Key, Tensor], processes: int) -> dict[_Key, TensorRecord]:
    """Decide where each tensor is stored, for all processes.

    What several processes hold is written by those of them that have the least to write so far, the largest
    tensors first. A small one goes where the one before went while that has less than its fair share: a
    process that reads all of them then opens few files.

    Raises:
        CheckpointError: A tensor that cannot be stored, or too many processes.
    """
    if processes > MAX_PROCESSES:
        raise CheckpointError(f"{processes} processes cannot save together; at most {MAX_PROCESSES} can")
    known: dict[object, tuple[Layout, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    records: dict[_Key, TensorRecord] = {}
    loads = np.zeros(processes, dtype=np.int64)
    share = 1.01 * sum(each.numel() * each.element_size() for each in tensors.values()) / processes
    first = -1
    for key in sorted(tensors, key=lambda each: -tensors[each].numel() * tensors[each].element_size()):
        tensor: Any = tensors[key]
        check_tensor(tensor, "/".join(key))
        described: list[object] = [tensor.dtype, tensor.shape]
        if is_sharded(tensor):
            described += [tensor.device_mesh, tensor.placements]
        kind = tuple(described)
        if kind not in known:
            layout, copies = (
                _layout(tensor, "/".join(key))
                if is_sharded(tensor)
                else (_whole(tensor), list(range(processes)))
            )
            known[kind] = layout, np.asarray(copies), np.asarray(cells(layout).numbers)
        layout, firsts, numbers = known[kind]
        size = layout.bytes // len(numbers)
        if first not in firsts or loads[first + numbers].max() + size > share:
            first = int(firsts[np.argmin(loads[firsts + numbers[0]])])
        loads[first + numbers] += size
        records[key] = TensorRecord(layout, first)
    pieces = sum(layout.count for layout, _, _ in known.values())
    if pieces > MAX_PIECES:
        raise CheckpointError(
            f"the layouts of the tensors have {pieces} pieces on {processes} processes; at most {MAX_PIECES}"
            " are allowed. Shard over fewer processes, and replicate over the others (HSDP)"
        )
    return {key: records[key] for key in tensors}


def _layout(tensor: Any, where: str) -> tuple[Layout, list[int]]:
    """The layout of a `DTensor`, and the first process of each copy of it."""
    mesh = np.asarray(tensor.device_mesh.mesh.tolist())
    axes: list[list[tuple[bool, int]]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise CheckpointError(f"{where}: the processes hold summands of it; call .redistribute() on it")
        if not placement.is_replicate():
            # A strided shard divides what the plain ones have divided, in whichever order they are listed.
            axes[placement.dim].append((hasattr(placement, "split_factor"), axis))
    cutting = [axis for listed in axes for _, axis in sorted(listed)]
    steps = [
        int(mesh.take(1, axis).flat[0] - mesh.flat[0]) if mesh.shape[axis] > 1 else 1
        for axis in range(mesh.ndim)
    ]
    regular = mesh.flat[0] + np.tensordot(steps, np.indices(mesh.shape), 1)
    is_regular = min(steps) > 0 and np.array_equal(mesh, regular)
    if not is_regular:  # the processes in an order of their own: numbered by their places first
        steps = [int(np.prod(mesh.shape[axis + 1 :])) for axis in range(mesh.ndim)]
    grid: list[tuple[Cut, ...]] = [
        tuple((mesh.shape[axis], steps[axis]) for _, axis in sorted(listed) if mesh.shape[axis] > 1)
        for listed in axes
    ]
    layout = Layout(CODES[tensor.dtype], tuple(tensor.shape), tuple(grid))
    if is_regular:
        copies = mesh[tuple(0 if axis in cutting else slice(None) for axis in range(mesh.ndim))]
        return layout, copies.reshape(-1).tolist()
    spelled = Cells(layout)
    files = tuple(int(mesh.flat[number]) for number in spelled.numbers)
    cuts = tuple(tuple(starts) for starts in spelled.starts)
    return Layout(layout.dtype, layout.shape, cuts=cuts, files=files), [0]


def _take(
    tensors: Mapping[_Key, Tensor], records: Mapping[_Key, TensorRecord], plan: Plan, rank: int
) -> None:
    """Enter what rank 0 has planned, and this process's pieces, into the plan.

    Raises:
        CheckpointError: This process has other tensors than rank 0, or holds other pieces of them.
    """
    for key, each in tensors.items():
        check_tensor(each, "/".join(key))
    mine = {f"{'/'.join(key)}: {CODES[each.dtype]}{list(each.shape)}" for key, each in tensors.items()}
    theirs = {f"{'/'.join(key)}: {each.dtype}{list(each.shape)}" for key, each in records.items()}
    if mine != theirs:
        differing = ", ".join(sorted(mine ^ theirs)[:6])
        raise CheckpointError(f"rank {rank} saves other tensors than rank 0: {differing}")
    for key, record in records.items():
        group, name = key
        plan.records[group][name] = record
        piece = record.piece(rank)
        if piece is None:
            continue
        tensor: Any = tensors[key]
        held = local_box(tensor) if is_sharded(tensor) else ((0,) * tensor.ndim, tuple(tensor.shape))
        if held != piece[1:]:
            raise CheckpointError(
                f"{group}/{name}: rank {rank} holds the box of shape {list(held[1])} at {list(held[0])}."
                f" The placements {record.layout.grid} of rank 0 give it {list(piece.shape)} at"
                f" {list(piece.offset)}. Shard it the same way on every rank, in boxes"
            )
        plan.parts[group][name] = tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def box_to_read(name: str, shape: tuple[int, ...], pattern: Tensor | None) -> Box:
    """The box of a stored tensor that this process needs.

    Args:
        name: The tensor's name.
        shape: The stored shape.
        pattern: A tensor that is sharded as the result shall be; None for the whole.

    Raises:
        CheckpointError: The tensor has another shape here than there.
    """
    if pattern is None:
        return (0,) * len(shape), shape
    if tuple(pattern.shape) != shape:
        raise CheckpointError(
            f"{name!r} has shape {list(shape)} in the checkpoint, {list(pattern.shape)} here"
        )
    return local_box(pattern)
