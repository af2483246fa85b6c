"""The norm of a gradient of which each process has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed


def clip_by_global_norm(
    parameters: Sequence[Tensor], max_norm: float, device: torch.device, world_size: int
) -> Tensor:
    """Clip by the norm of the whole gradient, and return that (0-d, the same on all processes).

    Parameters may be sharded over meshes of any kind, or plain and the same on all processes; torch's own
    clipping takes those of one mesh. What several processes have is counted by each in its part, so that one
    sum over all of them is enough.

    Args:
        parameters: Those with a gradient count.
        max_norm: The largest norm.
        device: Where processes exchange tensors.
        world_size: How many there are.
    """
    alike: dict[tuple[torch.device, int], list[Tensor]] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            held = _holders(gradient, world_size)
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            alike.setdefault((local.device, held), []).append(local.detach())
    dtypes = {each.dtype for gradients in alike.values() for each in gradients}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    square = torch.zeros((), dtype=wide, device=device)
    for (_, held), gradients in alike.items():
        norms = torch._foreach_norm(gradients, 2, dtype=wide)
        square += (torch.stack(list(norms)).square().sum() / held).to(device)
    if world_size > 1:
        distributed.all_reduce(square)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's, without a look at it on the host
    for (place, _), gradients in alike.items():
        torch._foreach_mul_(gradients, factor.to(place))
    return norm


def _holders(gradient: Any, world_size: int) -> int:
    """How many processes have the same part of it as this one."""
    parts = 1
    for dimension, placement in enumerate(getattr(gradient, "placements", ())):
        if not placement.is_replicate():
            parts *= gradient.device_mesh.size(dimension)
    return world_size // parts
