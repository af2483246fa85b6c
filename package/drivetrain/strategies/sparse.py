"""Sparse gradients: an embedding with `sparse=True` has gradients only for the rows that a step used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn

from drivetrain.core.errors import StrategyError
from drivetrain.task.optim.groups import embedding_parameters


def trained_sparsely(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that get sparse gradients."""
    return [each for each in embedding_parameters(module, sparse=True) if each.requires_grad]


def refuse_sparse(task: nn.Module, strategy: str, reason: str) -> None:
    """Check that no parameter of a task gets a sparse gradient."""
    sparse = {id(each) for each in trained_sparsely(task)}
    name = next((name for name, each in task.named_parameters() if id(each) in sparse), None)
    if name is not None:
        raise StrategyError(
            f"{name!r} of {type(task).__name__} gets sparse gradients, which strategy {strategy!r} does not"
            f" support: {reason}. Create the embedding with sparse=False, or train in one process, or with"
            " 'ddp' on CPUs"
        )


def no_rows(parameter: nn.Parameter) -> Tensor:
    """Return a zero scalar whose backward gives an embedding's weights a sparse gradient without rows."""
    nothing = torch.zeros(0, dtype=torch.int64, device=parameter.device)
    return nn.functional.embedding(nothing, parameter, sparse=True).sum().float()


def average_sparse(parameters: Iterable[Tensor], world_size: int) -> None:
    """Average sparse gradients over all processes; a gradient that no process has stays None."""
    for each in parameters if world_size > 1 else ():
        gradient = each.grad
        if gradient is None:
            gradient = torch.zeros(each.shape, dtype=each.dtype, device=each.device, layout=torch.sparse_coo)
        gradient = gradient.coalesce()
        distributed.all_reduce(gradient)
        each.grad = gradient.div_(world_size) if gradient._nnz() else None


def clip_grad_norm(parameters: Sequence[Tensor], max_norm: float, sparse: Sequence[Tensor] = ()) -> Tensor:
    """Clip by the global norm.

    Args:
        sparse: The parameters whose gradients may be sparse; torch cannot compute the norm of those.
    """
    if not sparse:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return torch.nn.utils.clip_grad_norm_([_rows(each) for each in parameters], max_norm)


def clip_grad_value(parameters: Sequence[Tensor], max_value: float) -> None:
    """Clip each element of the gradients, or of this process's shards of them."""
    gradients = [_local(grad) for each in parameters if (grad := _rows(each).grad) is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)


def _local(gradient: Tensor) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _rows(parameter: Tensor) -> Tensor:
    """Return a placeholder whose gradient is the rows of the sparse one, coalesced and sharing its memory."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return parameter
    parameter.grad = gradient = gradient.coalesce()
    rows = gradient._values()
    placeholder = torch.empty_like(rows)
    placeholder.grad = rows
    return placeholder
