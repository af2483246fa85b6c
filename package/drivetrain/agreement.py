"""What all processes of a run must have alike: found before they exchange anything that would go wrong."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import ConfigError, StrategyError

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_SETTINGS = (
    "max_epochs",
    "max_steps",
    "max_time",
    "precision",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "validate_every",
    "log_every",
    "checkpoint",
    "train_metrics",
    "seed",
    "limit_train_batches",
    "limit_validation_batches",
    "limit_test_batches",
    "limit_predict_batches",
)
"""What decides what a process does, and when; loggers, callbacks and the screen may be one rank's alone."""


def check_alike(trainer: Trainer, task: nn.Module, ranks: Ranks) -> None:
    """See that the ranks have the same settings, and tasks of the same parameters.

    One exchange of a few numbers, before a run; names the first that differs.

    Raises:
        ConfigError: A setting of the Trainer differs.
        StrategyError: A parameter or buffer differs in name, shape, dtype or whether it is trained.
    """
    if ranks.size == 1:
        return
    settings = {name: repr(getattr(trainer, name)) for name in _SETTINGS}
    tensors = _described(task)
    found = ranks.all_gather((settings, zlib.crc32(repr(tensors).encode())))
    for rank, (theirs, _) in enumerate(found):
        for name, value in theirs.items():
            if value != found[0][0][name]:
                raise ConfigError(
                    f"the ranks were given different Trainers: {name} is {found[0][0][name]} on rank 0 and"
                    f" {value} on rank {rank}. Give all the same; rank 0 alone writes files"
                )
    if any(digest != found[0][1] for _, digest in found):
        raise _different(ranks.all_gather(tensors))


def _described(task: nn.Module) -> list[tuple[Any, ...]]:
    sized = [(name, each) for name, each in task.named_parameters() if not is_lazy(each)]
    parameters = [(name, list(each.shape), str(each.dtype), each.requires_grad) for name, each in sized]
    return [*parameters, *((name, list(each.shape), str(each.dtype)) for name, each in task.named_buffers())]


def _different(found: list[list[tuple[Any, ...]]]) -> StrategyError:
    first = found[0]
    for rank, other in enumerate(found):
        for mine, theirs in zip(first, other, strict=False):
            if mine != theirs:
                return StrategyError(
                    f"the ranks have different tasks: rank 0 has {_text(mine)}, rank {rank} {_text(theirs)}."
                    " Make the same task on all"
                )
        if len(other) != len(first):
            return StrategyError(
                f"the ranks have different tasks: rank 0 has {len(first)} parameters and buffers, rank {rank}"
                f" {len(other)}. Make the same task on all"
            )
    return StrategyError("the ranks have different tasks")


def _text(described: tuple[Any, ...]) -> str:
    name, shape, dtype, *trained = described
    frozen = ", frozen" if trained == [False] else ""
    return f"{name!r} of shape {shape} ({dtype}{frozen})"
