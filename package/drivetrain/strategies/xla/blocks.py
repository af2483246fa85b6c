"""Blocks of a model under XLA's sharded strategies: choosing them, and recomputing them in backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.wrapping import Wrap, are_names, check_wrap, units
from drivetrain.task.blocks import repeated_blocks

RecomputeOption = bool | str | tuple[str, ...]
"""A user's choice of blocks to recompute; see `XLAFSDPConfig.activation_checkpointing`."""

_PATCHED = ("forward", "_xla_checkpointed_forward_original", "_xla_checkpointed_forward_no_kwargs")
"""The attributes that torch_xla's `checkpoint_module` adds to a module."""


def check_blocks(kind: str, wrap: Wrap, again: RecomputeOption) -> None:
    """Check the options that choose blocks."""
    check_wrap(kind, wrap)
    if not (again is False or again == "full" or are_names(again)):
        raise ConfigError(
            f"{kind}(activation_checkpointing=...) must be False, 'full' or names of classes, not {again!r}"
        )


def checkpoint_blocks(model: nn.Module, again: RecomputeOption) -> list[nn.Module]:
    """Recompute blocks in backward, by torch_xla's `checkpoint_module`.

    XLA's compiler would undo torch's own recomputation, because it merges equal computations.
    """
    from torch_xla.distributed.fsdp import checkpoint_module

    if not again:
        return []
    blocks = repeated_blocks(model) if again == "full" else units(model, tuple(again))  # type: ignore[arg-type]
    for block in blocks:
        checkpoint_module(block)
    return blocks


def forget_checkpointing(blocks: Sequence[nn.Module]) -> None:
    """Revert the blocks of `checkpoint_blocks`."""
    for block in blocks:
        for name in _PATCHED:
            vars(block).pop(name, None)
