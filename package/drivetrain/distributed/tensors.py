"""What processes do together with tensors, where these are; identities for one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn

_BUCKET = 25 << 20
"""Bytes that are sent together: enough for the line's full speed, and little memory."""


def broadcast_module(module: nn.Module, world_size: int) -> None:
    """Give every process the parameters and buffers of rank 0, in place."""
    if world_size == 1:
        return
    seen: set[int] = set()
    tensors = []
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in seen and tensor.device.type != "meta":
            seen.add(id(tensor))
            tensors.append(tensor.detach())
    for bucket in _buckets(tensors):
        flat = torch.cat([each.reshape(-1) for each in bucket])
        distributed.broadcast(flat, 0)
        for each, part in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
            each.copy_(part.view_as(each))


def average_gradients(parameters: Sequence[Tensor], world_size: int) -> None:
    """Replace the gradients by their means over all processes; one that no process has stays None."""
    if world_size == 1:
        return
    device = parameters[0].device
    has = torch.tensor([each.grad is not None for each in parameters], dtype=torch.uint8, device=device)
    distributed.all_reduce(has, distributed.ReduceOp.MAX)
    used = [each for each, somewhere in zip(parameters, has.tolist(), strict=True) if somewhere]
    for each in used:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
    gradients = [each.grad for each in used if each.grad is not None]
    for bucket in _buckets(gradients):
        flat = torch.cat([each.reshape(-1) for each in bucket])
        distributed.all_reduce(flat)
        flat /= world_size
        for each, part in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
            each.copy_(part.view_as(each))


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype and device, as many as are sent together."""
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
