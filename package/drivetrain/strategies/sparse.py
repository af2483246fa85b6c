"""Sparse gradients: those of embeddings made with `sparse=True`, with only the rows that a step used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn

from drivetrain.errors import StrategyError
from drivetrain.parameter_groups import sparse_parameters


def trained_sparsely(module: nn.Module) -> list[nn.Parameter]:
    """The trained parameters that get sparse gradients."""
    return [each for each in sparse_parameters(module) if each.requires_grad]


def refuse_sparse(task: nn.Module, strategy: str, reason: str) -> None:
    """See that no parameter of a task gets a sparse gradient.

    Raises:
        StrategyError: One does; names it.
    """
    sparse = {id(each) for each in trained_sparsely(task)}
    name = next((name for name, each in task.named_parameters() if id(each) in sparse), None)
    if name is not None:
        raise StrategyError(
            f"{name!r} of {type(task).__name__} gets sparse gradients, and strategy {strategy!r} cannot have"
            f" them: {reason}. Make the embedding with sparse=False, or train in one process, or with 'ddp'"
            " on CPUs"
        )


def no_rows(parameter: nn.Parameter) -> Tensor:
    """A scalar, zero, whose backward gives an embedding's weights a sparse gradient without a row."""
    nothing = torch.zeros(0, dtype=torch.int64, device=parameter.device)
    return nn.functional.embedding(nothing, parameter, sparse=True).sum().float()


def average_sparse(parameters: Iterable[Tensor], world_size: int) -> None:
    """Replace sparse gradients by their means over all processes; one that no process has stays None."""
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
        parameters: What the gradients are of.
        max_norm: What to clip to.
        sparse: Those parameters whose gradients may be sparse: torch has no norm of them.

    Returns:
        The norm before clipping (0-d).
    """
    if not sparse:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return torch.nn.utils.clip_grad_norm_([_rows(each) for each in parameters], max_norm)


def _rows(parameter: Tensor) -> Tensor:
    """What stands for a parameter: of a sparse gradient the rows, each there once, which share its memory."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return parameter
    parameter.grad = gradient = gradient.coalesce()
    rows = gradient._values()
    standing = torch.empty_like(rows)
    standing.grad = rows
    return standing
