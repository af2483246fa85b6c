"""The memory that one process needs for a task that FSDP2 shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.strategies.base import Memory
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.fsdp.tensor_parallel import split_modules
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.wrapping import ignored_names, indivisible_names, parameters_named


def sharded_memory(task: nn.Module, config: FSDPConfig, precision: Precision, shards: int) -> Memory:
    """Return the shards of the first process, which has the largest.

    Args:
        task: The task.
        config: The options.
        precision: The run's precision.
        shards: The processes that a parameter is sharded over.
    """
    split = config.tensor_parallel
    parallel = split_modules(task, config)
    divided = {each for part in parallel for each in part.module.parameters(recurse=False)}
    kept = parameters_named(task, ignored_names(task, config.ignored) | indivisible_names(task))
    fractions: dict[Tensor, float] = {
        each: min(1.0, -(-each.shape[0] // (shards * (split if each in divided else 1))) / each.shape[0])
        for each in task.parameters()
        if each not in kept and each.numel()
    }
    stored = precision.param_dtype or next((each.dtype for each in task.parameters()), torch.float32)
    return Memory(
        fractions,
        offloaded=frozenset(Memory().divided) if config.cpu_offload else frozenset(),
        forward_dtype=None if precision.compute_dtype == stored else precision.compute_dtype,
    )
