"""Optimizers that keep their state in 8 or 4 bits, or in float8, and how that state is stored.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022; Li et al., "Memory Efficient
Optimizers with 4-bit States", NeurIPS 2023; as implemented in torchao. The optimizer sees a state as one
tensor. It consists of codes in blocks, each block's scale, and the table of the codes' values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import CheckpointError, ConfigError, MissingDependencyError
from drivetrain.core.registry import is_installed

PART = "."
"""The separator between the name of a slot and the name of a part of its tensor."""

_OF_TORCHAO = ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")

_LEAST_ELEMENTS = 4096
"""torchao quantizes states of at least this many elements."""

QUANTIZED = {name.lower(): f"drivetrain.task.optim.quantized:{name.lower()}" for name in _OF_TORCHAO}
"""The rows of `OPTIMIZERS` that torchao provides."""


def __getattr__(name: str) -> Callable[..., Optimizer]:
    """Import a class of torchao by its lower-case name."""
    kind = next((each for each in _OF_TORCHAO if each.lower() == name), None)
    if kind is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_installed("torchao"):
        raise MissingDependencyError("torchao", "torchao", f"the optimizer {name!r}")
    from torchao import optim

    return getattr(optim, kind)  # type: ignore[no-any-return]


def is_quantized(value: object) -> bool:
    """Return whether a tensor consists of others, by torch's protocol for subclasses."""
    return (
        isinstance(value, Tensor)
        and hasattr(value, "__tensor_flatten__")
        and not hasattr(value, "placements")
    )


def compiles_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer compiles its own step."""
    return type(optimizer).__module__.startswith("torchao.")


def uncompiled(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Return a context that runs the optimizer's step uncompiled."""
    return torch.compiler.set_stance("force_eager") if compiles_itself(optimizer) else nullcontext()


def parts_of(key: str, value: Tensor) -> dict[str, Tensor]:
    """Return the parts of a quantized tensor, by `key` and their names."""
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return {f"{key}{PART}{name}": getattr(value, name).detach() for name in names}


def from_parts(optimizer: Optimizer, parameter: Tensor, slot: str, parts: dict[str, Tensor]) -> Tensor:
    """Return a quantized tensor of this optimizer with the values of these parts.

    The optimizer makes the tensor; no class is looked up by a name in a file.
    """
    make = getattr(optimizer, "_new_buffer", None)
    fresh = None if make is None else make(parameter, slot == "exp_avg")
    if fresh is None or not is_quantized(fresh):
        raise CheckpointError(
            f"the checkpoint's optimizer state {slot!r} is quantized, and this {type(optimizer).__name__}'s"
            f" of a parameter of shape {list(parameter.shape)} is not"
        )
    own = {name.removeprefix(PART): each for name, each in parts_of("", fresh).items()}
    kinds: list[dict[str, Any]] = [
        {name: (each.dtype, tuple(each.shape)) for name, each in found.items()} for found in (own, parts)
    ]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"the checkpoint's optimizer state {slot!r} consists of {kinds[1]}, and this run's of {kinds[0]}."
            " Resume with the same block_size, or load the weights only"
        )
    for name, each in own.items():
        each.copy_(parts[name])
    whole: Tensor = fresh
    return whole


def check_quantized(optimizer: Optimizer) -> None:
    """Check that a quantized optimizer supports its options, and that its parameters are not sharded.

    Raises:
        ConfigError: An option that it accepts but that would fail or have no effect; or sharded parameters,
            because a block of a quantized state cannot span shards.
    """
    if not compiles_itself(optimizer):
        return
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if any(group.get("amsgrad") for group in groups):
        raise ConfigError(f"{name}(amsgrad=True): torchao has no such step. Leave it out, or use 'adamw'")
    size = getattr(optimizer, "block_size", None)
    if size is not None and not (type(size) is int and size >= 1):
        raise ConfigError(f"{name}(block_size=...) is a whole number of elements, such as 256, not {size!r}")
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    large = [each.numel() for each in parameters if each.numel() >= _LEAST_ELEMENTS]
    if size and large and all(each % size for each in large):
        raise ConfigError(
            f"{name}(block_size={size}) divides the number of elements of no parameter, so that no state"
            f" would be quantized. Use a power of two, such as 256; the largest has {max(large)} elements"
        )
    if any(hasattr(each, "placements") for each in parameters):
        raise ConfigError(
            f"{type(optimizer).__name__} on sharded parameters: a checkpoint could not hold its state's"
            " blocks for another number of processes. Use 'adamw', or strategy 'ddp'"
        )
