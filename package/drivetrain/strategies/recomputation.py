"""Activation checkpointing: computing again in backward what forward then need not keep.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; what is kept by operation as in
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022; realised by torch's
`checkpoint` and `create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from drivetrain.blocks import is_called, repeated_blocks
from drivetrain.compiling import compiled_forward
from drivetrain.errors import ConfigError, nearest
from drivetrain.strategies.fsdp_wrapping import units
from drivetrain.strategies.recomputed import CallsAgain, Contexts, Recomputed

Again = bool | str | tuple[str, ...] | Callable[..., Any]
"""What is computed again in backward; see `FSDPConfig.activation_checkpointing`."""

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""The operations that take nearly all of the time: their results are kept under "selective"."""


def as_again(owner: str, again: object) -> Again:
    """A user's `activation_checkpointing` in one form: of classes their names, and of one name a tuple.

    Args:
        owner: The configuration's class, for the message.
        again: What was given.

    Raises:
        ConfigError: It is none; says what is.
    """
    if again is False or (callable(again) and not isinstance(again, type)):
        return again
    if again is True or again in ("full", "selective"):
        return "full" if again is True else str(again)
    given = tuple(again) if isinstance(again, (tuple, list)) else (again,)
    modules = [isinstance(each, type) and issubclass(each, nn.Module) for each in given]
    if not all(module or isinstance(each, str) for module, each in zip(modules, given, strict=True)):
        raise ConfigError(
            f"{owner}(activation_checkpointing=...) is True, False, 'full', 'selective', classes of modules"
            f" or their names, such as ('Block',), or a policy, not {again!r}"
        )
    return tuple(each if isinstance(each, str) else each.__name__ for each in given)


def checkpoint_blocks(model: nn.Module, again: Again) -> list[nn.Module]:
    """Have blocks computed again in backward, as `FSDPConfig.activation_checkpointing` says.

    Returns:
        The blocks that are.

    Raises:
        ConfigError: A class of which the model has none; lists the nearest.
    """
    if not again:
        return []
    classes = isinstance(again, (tuple, list))
    blocks = units(model, tuple(again)) if classes else repeated_blocks(model)  # type: ignore[arg-type]
    recompute(blocks, again)
    return blocks


def recompute(blocks: Sequence[nn.Module], again: Again) -> None:
    """Have these modules computed again in backward.

    Args:
        blocks: Each by itself.
        again: "selective" or a policy keep some operations' results; anything else keeps none.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts: Contexts | None = None
    policy: Any = [getattr(torch.ops.aten, name).default for name in _KEPT] if again == "selective" else again
    if again == "selective" or callable(again):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in blocks:
        compiled = compiled_forward(block)
        if compiled is None:
            Recomputed(block, contexts)
        else:
            compiled.recompute(CallsAgain(block, contexts))


def chosen_blocks(model: nn.Module, again: Again) -> list[nn.Module]:
    """The modules that are computed again: by class, by globs on their names, or the repeated blocks.

    Parameters that a block shares with the rest of a model do not matter where nothing is gathered.

    Raises:
        ConfigError: There is no such module, or none that is repeated; says what there is.
    """
    if not isinstance(again, (tuple, list)):
        blocks = list({id(each): each for each in repeated_blocks(model, tied=True)}.values())
        if not blocks:
            raise ConfigError(
                f"{type(model).__name__} has no repeated blocks in a list of modules, whose activations could"
                " be computed again. Name classes or modules: activation_checkpointing=('encoder.*',)"
            )
        return blocks
    named = [(name, each) for name, each in model.named_modules() if name and is_called(each)]
    kinds = {type(each).__name__ for _, each in named}
    for wanted in again:
        if wanted not in kinds and not any(fnmatchcase(name, wanted) for name, _ in named):
            known = ["full", "selective", *sorted(kinds), *(name for name, _ in named)]
            raise ConfigError(f"no module has the class or the name {wanted!r}. {nearest(wanted, known)}")
    found: list[nn.Module] = []
    inside: set[int] = set()
    for name, module in named:  # outer ones first
        mine = any(type(module).__name__ == each or fnmatchcase(name, each) for each in again)
        if mine and id(module) not in inside:
            found.append(module)
            inside.update(id(each) for each in module.modules())
    return found


class Recomputation:
    """Blocks of a model that are computed again until `remove`.

    Args:
        model: Before it is sharded or wrapped.
        again: Which, and what of them.

    Attributes:
        blocks: Those that are.

    Raises:
        ConfigError: There are none such.
    """

    def __init__(self, model: nn.Module, again: Again) -> None:
        self.blocks = chosen_blocks(model, again)
        recompute(self.blocks, again)

    def remove(self) -> None:
        """Make the blocks ordinary modules again."""
        for block in self.blocks:
            forget(block)


def forget(module: nn.Module) -> None:
    """Make a module an ordinary one again, if it is computed again."""
    forward = vars(module).get("forward")
    if isinstance(forward, Recomputed):
        forward.remove()
