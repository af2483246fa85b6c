"""Collectives on tensors, each on its device; with one process they do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BUCKET = 25 << 20
"""Bytes that are sent together: enough to reach full bandwidth with little memory."""


def broadcast_module(module: nn.Module, world_size: int) -> None:
    """Give every process the parameters and buffers of rank 0, in place."""
    if world_size > 1:
        _broadcast((*module.parameters(), *module.buffers()))


def broadcast_buffers(module: nn.Module, world_size: int) -> None:
    """Give every process the buffers of rank 0, such as running means, in place."""
    if world_size > 1:
        _broadcast([getattr(each, "_local_tensor", each) for each in module.buffers()])


def _broadcast(tensors: Iterable[Tensor]) -> None:
    plain = (each for given in tensors for each in _parts(given) if each.device.type != "meta")
    unique = {id(each): each.detach() for each in plain}
    for bucket in _buckets(unique.values()):
        flat = torch.cat([each.reshape(-1) for each in bucket])
        distributed.broadcast(flat, 0)
        for each, part in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
            each.copy_(part.view_as(each))


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a quantised tensor is made of; any other tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [each for name in names for each in _parts(getattr(tensor, name))]


def average_gradients(parameters: Sequence[Tensor], world_size: int) -> None:
    """Replace the gradients by their means over all processes; one that no process has stays None."""
    if world_size == 1:
        return
    for bucket in _buckets(parameters):
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        # How many processes have each gradient is summed too; only one that lacks a gradient waits for it.
        complete = all(each.grad is not None for each in bucket)
        has = torch.ones(len(bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        if not complete:
            has = torch.tensor([float(each.grad is not None) for each in bucket]).to(has)
        flat = torch.cat([*(each.detach().reshape(-1) for each in gradients), has])
        distributed.all_reduce(flat)
        *means, has = torch.split(flat, [*(each.numel() for each in bucket), len(bucket)])
        holders = None if complete else has.tolist()
        for number, (each, gradient, mean) in enumerate(zip(bucket, gradients, means, strict=True)):
            if holders is None or holders[number]:
                each.grad = gradient
                gradient.copy_((mean / world_size).view_as(gradient))


def local_part(tensor: Tensor, world_size: int) -> tuple[Tensor, float]:
    """Return this process's part of a tensor, and its share of the part: 1/n if n processes have that part.

    So a sum over all processes of what each computes from its part, times the share, counts every part once.
    """
    parts = 1
    placed: Any = tensor
    for dimension, placement in enumerate(getattr(placed, "placements", ())):
        if not placement.is_replicate():
            parts *= placed.device_mesh.size(dimension)
    local: Tensor = placed.to_local() if hasattr(placed, "to_local") else placed
    return local.detach(), parts / world_size


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors of one dtype and device into buckets of `_BUCKET` bytes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
