"""Plan sharded saves and loads: the part of each tensor that a process writes, and the box that it reads.

The placement of a `DTensor` on its mesh determines the box of each process. So rank 0 plans for all, and only
its plan is sent: one layout per tensor, whose size does not grow with the number of processes. Each process
then finds its pieces in the plan, and checks that they match the boxes that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from drivetrain.checkpoint.format.manifest import SavePlan
from drivetrain.checkpoint.format.records import MAX_PIECES, MAX_PROCESSES, Cut, Layout, TensorRecord, cells
from drivetrain.checkpoint.format.tensors import CODES, check_tensor
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks

Groups: TypeAlias = Mapping[str, Mapping[str, Tensor]]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape, by dimension."""

Like: TypeAlias = Callable[[str, str, tuple[int, ...]], Tensor | None]
"""A function from a stored tensor's group, name and shape to a tensor with the result's sharding, or None."""

_Key: TypeAlias = tuple[str, str]
"""Group and name."""


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a `DTensor`, so that each process holds a part or a copy."""
    # By name, because importing the class takes half a second, which a single process need not spend.
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed.")


def local_box(tensor: Any) -> Box:
    """Return this process's box of a `DTensor`; an empty box if it holds nothing."""
    local = tensor.to_local()
    if not local.numel():
        return (0,) * local.ndim, tuple(local.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def plan_save(tensors: Groups, unshared: Collection[str], ranks: Ranks) -> SavePlan:
    """Divide the writing among the processes; all of them must call this.

    Args:
        tensors: Group to name to tensor. Each process writes its shard of a `DTensor`. A plain tensor is
            equal on every process, and one of them writes it.
        unshared: Groups that differ between the processes; rank 0 writes its tensors.
    """
    shared: dict[_Key, Tensor] = {}
    plan = SavePlan({group: {} for group in tensors}, {group: {} for group in tensors}, ranks.size)
    for group, named in tensors.items():
        for name, tensor in named.items():
            # An empty tensor has no parts to divide.
            if ranks.size > 1 and group not in unshared and tensor.numel():
                shared[group, name] = tensor
            elif ranks.rank == 0:
                check_tensor(tensor, f"the group {group!r}, {name!r}")
                plan.records[group][name] = _whole(CODES[tensor.dtype], tuple(tensor.shape))
                plan.parts[group][name] = _alone(tensor)
    if ranks.size > 1:
        records = ranks.first(lambda: divide(shared, ranks.size))
        ranks.together(lambda: _take(shared, records, plan, ranks.rank))
        for group, named in tensors.items():
            order = [name for name in named if name in plan.records[group]]
            plan.records[group].update({name: plan.records[group].pop(name) for name in order})
    return plan


@lru_cache(maxsize=4096)  # a run saves tensors of the same dtypes and shapes again and again
def _whole(dtype: str, shape: tuple[int, ...]) -> TensorRecord:
    return TensorRecord(Layout.whole(dtype, shape))


def _alone(tensor: Tensor) -> Tensor:
    """Return a whole tensor for the only process that writes it."""
    if not is_sharded(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    # On a mesh of one process, the shard is the whole tensor.
    sharded: Any = tensor
    local: Tensor = sharded.to_local().detach()
    if local.shape != tensor.shape:
        raise CheckpointError(f"a tensor of shape {list(tensor.shape)} is sharded, but one process saves it")
    return local


def divide(tensors: Mapping[_Key, Tensor], processes: int) -> dict[_Key, TensorRecord]:
    """Assign each tensor to the processes that write it.

    A tensor that several processes hold is written by those with the least to write so far, the largest
    tensors first. A small tensor goes to the process of the one before, while that has less than its fair
    share: then a process that reads all of them opens few files.
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
                else (_whole(CODES[tensor.dtype], tuple(tensor.shape)).layout, list(range(processes)))
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
    """Return the layout of a `DTensor`, and the first process of each copy."""
    mesh = np.asarray(tensor.device_mesh.mesh.tolist())
    axes: list[list[tuple[bool, int]]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise CheckpointError(f"{where}: its placement is Partial; call .redistribute() on it first")
        if not placement.is_replicate():
            # A strided shard divides the parts of the plain shards, in whichever order they are listed.
            axes[placement.dim].append((hasattr(placement, "split_factor"), axis))
    cutting = [axis for listed in axes for _, axis in sorted(listed)]
    steps = [
        int(mesh.take(1, axis).flat[0] - mesh.flat[0]) if mesh.shape[axis] > 1 else 1
        for axis in range(mesh.ndim)
    ]
    if min(steps) < 1 or (mesh != mesh.flat[0] + np.tensordot(steps, np.indices(mesh.shape), 1)).any():
        raise CheckpointError(
            f"{where}: its mesh has the ranks in the order {str(mesh.tolist())[:80]}. A checkpoint can have"
            " meshes whose ranks rise by equal steps along each dimension, as init_device_mesh makes them"
        )
    grid: list[tuple[Cut, ...]] = [
        tuple((mesh.shape[axis], steps[axis]) for _, axis in sorted(listed) if mesh.shape[axis] > 1)
        for listed in axes
    ]
    copies = mesh[tuple(0 if axis in cutting else slice(None) for axis in range(mesh.ndim))]
    return Layout(CODES[tensor.dtype], tuple(tensor.shape), tuple(grid)), copies.reshape(-1).tolist()


def _take(
    tensors: Mapping[_Key, Tensor], records: Mapping[_Key, TensorRecord], plan: SavePlan, rank: int
) -> None:
    """Add rank 0's records and this process's pieces to the plan."""
    for key, each in tensors.items():
        check_tensor(each, "/".join(key))
    mine = {f"{'/'.join(key)}: {CODES[each.dtype]}{list(each.shape)}" for key, each in tensors.items()}
    theirs = {f"{'/'.join(key)}: {each.dtype}{list(each.shape)}" for key, each in records.items()}
    if mine != theirs:
        differing = ", ".join(sorted(mine ^ theirs)[:6])
        raise CheckpointError(f"rank {rank} and rank 0 save different tensors: {differing}")
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
    """Return the box of a stored tensor that this process needs.

    Args:
        pattern: A tensor with the sharding of the result; None reads the whole tensor.
    """
    if pattern is None:
        return (0,) * len(shape), shape
    if tuple(pattern.shape) != shape:
        raise CheckpointError(f"{name!r}: shape {list(shape)} in the checkpoint, {list(pattern.shape)} here")
    return local_box(pattern)
