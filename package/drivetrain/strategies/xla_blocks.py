"""Blocks of a model under XLA's sharded strategies: how a user names them, and computing them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from drivetrain.blocks import repeated_blocks
from drivetrain.errors import ConfigError
from drivetrain.strategies.fsdp_wrapping import Wrap, units

Again = bool | str | tuple[str, ...]
"""Whose activations are computed again in backward; see `XLAFSDPConfig.activation_checkpointing`."""

_PATCHED = ("forward", "_xla_checkpointed_forward_original", "_xla_checkpointed_forward_no_kwargs")
"""What torch_xla's `checkpoint_module` puts into a module."""


def check_blocks(kind: str, wrap: Wrap, again: Again) -> None:
    """See that options name blocks.

    Args:
        kind: The configuration's class, for messages.
        wrap: Which are sharded together.
        again: Which are computed again.

    Raises:
        ConfigError: One does not.
    """
    count = isinstance(wrap, int) and not isinstance(wrap, bool) and wrap > 0
    if not (wrap == "auto" or _names(wrap) or count or callable(wrap)):
        raise ConfigError(
            f"{kind}(wrap=...) is 'auto', names of classes, a number of parameters or a function of a module,"
            f" not {wrap!r}"
        )
    if not (again is False or again == "full" or _names(again)):
        raise ConfigError(
            f"{kind}(activation_checkpointing=...) is False, 'full' or names of classes, not {again!r}"
        )


def _names(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)


def checkpoint_blocks(model: nn.Module, again: Again) -> list[nn.Module]:
    """Have blocks computed again in backward, by torch_xla's `checkpoint_module`: torch's own would be undone
    by XLA's compiler, to which computing something twice is waste.

    Returns:
        The blocks.

    Raises:
        ConfigError: A class of which the model has none; lists the nearest.
    """
    from torch_xla.distributed.fsdp import checkpoint_module

    if not again:
        return []
    blocks = repeated_blocks(model) if again == "full" else units(model, tuple(again))  # type: ignore[arg-type]
    for block in blocks:
        checkpoint_module(block)
    return blocks


def forget_checkpointing(blocks: Sequence[nn.Module]) -> None:
    """Make blocks that `checkpoint_blocks` gave ordinary modules again."""
    for block in blocks:
        for name in _PATCHED:
            vars(block).pop(name, None)
