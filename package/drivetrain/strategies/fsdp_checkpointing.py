"""Activation checkpointing: computing again in backward what forward then need not keep.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; what is kept by operation as in
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022; realised by torch's
composable `checkpoint` and `create_selective_checkpoint_contexts`, under which names stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from drivetrain.blocks import repeated_blocks
from drivetrain.compiling import compiled_forward
from drivetrain.strategies.fsdp_config import Again
from drivetrain.strategies.fsdp_wrapping import units

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


def checkpoint_blocks(model: nn.Module, again: Again) -> None:
    """Have blocks computed again in backward, as `FSDPConfig.activation_checkpointing` says.

    Raises:
        ConfigError: A class of which the model has none; lists the nearest.
    """
    if not again:
        return
    from torch.distributed._composable.checkpoint_activation import checkpoint
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    options: dict[str, Any] = {}
    policy: Any = [getattr(torch.ops.aten, name).default for name in _KEPT] if again == "selective" else again
    if again == "selective" or callable(again):
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    classes = isinstance(again, (tuple, list))
    for block in units(model, tuple(again)) if classes else repeated_blocks(model):  # type: ignore[arg-type]
        compiled = compiled_forward(block)
        if compiled is None:
            checkpoint(block, **options)
        else:
            compiled.recompute(**options)
