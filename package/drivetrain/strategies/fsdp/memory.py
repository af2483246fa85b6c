"""The memory that one process needs for a task that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drivetrain.strategies.base import Memory
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.fsdp.tensor_parallel import split_modules
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.wrapping import (
    around,
    batch_norms,
    ignored_names,
    indivisible_names,
    parameters_named,
    units,
)


def sharded_memory(
    task: nn.Module, config: FSDPConfig, precision: Precision, accumulates: bool, shards: int
) -> Memory:
    """Return the shards of the first process, which has the largest, and the most that is whole at a time.

    That is the root's weights, which stay gathered, a block and those gathered in advance, and in backward
    the gradients of the root and of a block, before and while they are reduced.

    Args:
        task: The task.
        config: The options.
        precision: The run's precision.
        accumulates: Whether a step has several micro-batches.
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
    mixed = precision.compute_dtype not in (None, precision.param_dtype or task_dtype(task))
    norms = batch_norms(task) if mixed else []
    blocks = [each for each in units(task, config.wrap) if each not in norms]
    if config.wrap == "auto":
        embeddings, heads = around(task, blocks, [each.module for each in parallel])
        blocks = [*embeddings, *blocks, *heads]
    inside = {each for part in (*norms, *blocks) for each in part.parameters()}

    def size(part: nn.Module, trained: bool = False, reduced: bool = False) -> int:
        total = 0
        for each in part.parameters():
            if each in kept or (part is task and each in inside) or (trained and not each.requires_grad):
                continue
            bytes_of_one = _gathered_dtype(each, precision, reduced).itemsize
            total += each.numel() // (split if each in divided else 1) * bytes_of_one
        return total

    largest = max(blocks, key=size, default=None)
    root = size(task) + size(task, trained=True)
    reduced = 0
    if largest is not None:
        reduced = size(largest, trained=True) + size(largest, trained=True, reduced=True)
    if accumulates and not config.reduce_each_micro_batch:  # gradients stay whole until the last one
        whole = sum(size(each, trained=True, reduced=True) for each in (task, *blocks))
        root, reduced = size(task), whole + size(task if largest is None else largest, trained=True)
    else:
        reduced = max(reduced, size(task, trained=True, reduced=True))
    return Memory(
        fractions,
        gathered=root + _gathered_at_once([*map(size, blocks)], config) + reduced,
        offloaded=frozenset(Memory().divided) if config.cpu_offload else frozenset(),
        forward_dtype=precision.compute_dtype if mixed else None,
    )


def _gathered_at_once(sizes: Sequence[int], config: FSDPConfig) -> int:
    """Return the most bytes of the blocks, of these sizes, whose weights are whole at a time."""
    if config.sharding in ("shard_grad_op", "no_shard"):
        return sum(sizes)
    ahead = 1 + max(1, config.forward_prefetch, config.backward_prefetch)
    return max((sum(sizes[at : at + ahead]) for at in range(len(sizes))), default=0)


def _gathered_dtype(parameter: Tensor, precision: Precision, reduced: bool) -> torch.dtype:
    """Return the dtype in which a parameter is gathered, or its gradient is reduced."""
    if precision.compute_dtype is None or not parameter.is_floating_point():
        return parameter.dtype
    return precision.reduce_dtype if reduced else precision.compute_dtype


def task_dtype(task: nn.Module) -> object:
    """Return the dtype of the task's first parameter, or None."""
    return next((each.dtype for each in task.parameters()), None)
