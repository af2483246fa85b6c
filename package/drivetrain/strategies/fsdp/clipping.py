"""Clipping by the norm of a sharded gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from drivetrain.distributed.tensors import held_here


def clip_by_global_norm(
    parameters: Sequence[Tensor], max_norm: float, device: torch.device, world_size: int
) -> Tensor:
    """Clip by the norm of the whole gradient, and return that norm (0-d, the same on all processes).

    Parameters may be sharded over different meshes, or replicated; torch's own clipping only takes parameters
    of one mesh. A part that n processes hold is counted as 1/n by each, so one sum over all processes is
    enough.

    Args:
        parameters: The parameters; those without a gradient are skipped.
        max_norm: The largest norm.
        device: The device that processes exchange tensors on.
        world_size: The number of processes.
    """
    grouped: dict[tuple[torch.device, float], list[Tensor]] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            held = held_here(gradient, world_size)
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            grouped.setdefault((local.device, held), []).append(local.detach())
    dtypes = {each.dtype for gradients in grouped.values() for each in gradients}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    square = torch.zeros((), dtype=wide, device=device)
    for (_, held), gradients in grouped.items():
        norms = torch._foreach_norm(gradients, 2, dtype=wide)
        square += (torch.stack(list(norms)).square().sum() * held).to(device)
    if world_size > 1:
        distributed.all_reduce(square)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's formula, without a host sync
    for (place, _), gradients in grouped.items():
        torch._foreach_mul_(gradients, factor.to(place))
    return norm
