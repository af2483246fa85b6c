"""Checks of tasks and options that several strategies share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import StrategyError
from drivetrain.core.validation import flag, number
from drivetrain.distributed.launch.environment import detect


def check_values(task: nn.Module, name: str, meta: bool = False) -> None:
    """Check that a task has all of its values before a strategy prepares it.

    Args:
        meta: Whether the strategy initialises a task on the meta device.

    Raises:
        StrategyError: A parameter is a shard left by an earlier run, is on the meta device, or belongs to a
            lazy module that has not run yet. The message names the first one.
    """
    tensors = (*task.named_parameters(), *task.named_buffers())
    lazy = next((each for each, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise StrategyError(
            f"{lazy!r} of {type(task).__name__} has no shape yet, because its module is lazy, and a run needs"
            " all shapes before it begins. Give the module its sizes, or call the task with one batch's"
            " inputs before the run"
        )
    if not meta:
        empty = next((each for each, tensor in task.named_parameters() if tensor.is_meta), None)
        if empty is not None:
            raise StrategyError(
                f"{type(task).__name__} was made on the meta device and has no values ({empty!r}). Strategies"
                f" 'fsdp' and 'zero3' create them, {name!r} does not: make it without torch.device('meta')"
            )
        from drivetrain.checkpoint.weights.stored_rows import stored_weights

        if stored_weights(task) is not None:
            raise StrategyError(
                f"{type(task).__name__} got load_weights(...) while it was on the meta device. 'fsdp' and"
                f" 'zero3' read the weights as they shard it, and {name!r} does not: call load_weights again"
            )
    shard = next((each for each, tensor in task.named_parameters() if _is_share(tensor)), None)
    if shard is not None:
        raise StrategyError(
            f"this {type(task).__name__} has only a shard of {shard!r}, left by an earlier run that failed or"
            f" had gather_at_end=False. Make it anew: {type(task).__name__}.from_checkpoint(path)"
        )


def check_replaced(task: nn.Module, before: Collection[int], name: str) -> None:
    """Check that no list, dict or other plain attribute of a module holds one of the replaced parameters.

    Args:
        before: The ids of the parameters before they were replaced.
    """
    now = {id(each) for each in task.parameters()}
    for path, module in task.named_modules():
        for attribute, value in vars(module).items():
            for each in tree_leaves(value):
                if isinstance(each, nn.Parameter) and id(each) in before and id(each) not in now:
                    raise StrategyError(
                        f"{'.'.join(filter(None, (path, attribute)))!r} of {type(task).__name__} is a"
                        f" {type(value).__name__} with a parameter. {name!r} replaces the parameters of"
                        " modules, and would not train this one: use an nn.ParameterList or"
                        " nn.ParameterDict, or reach the parameter by the attribute of its module"
                    )


def check_gathering(task: nn.Module, memory: int | None = None, processes: int | None = None) -> None:
    """Check that the whole values of a task, gathered when a run ends, fit into the memory of this machine.

    Each of its processes gets them. Before the run it costs nothing to be told so.

    Args:
        memory: Bytes of the host; by default those of this machine, or what its control group may use.
    """
    if processes is None:
        found = detect(os.environ)
        processes = 1 if found is None else found.local_world_size
    tensors: set[Any] = {*task.parameters(), *task.buffers()}
    # DeepSpeed's zero.Init leaves a parameter empty, with the size that it had.
    size = sum(getattr(each, "ds_numel", each.numel()) * each.itemsize for each in tensors)
    memory = host_memory() if memory is None else memory
    if size * processes > memory:
        raise StrategyError(
            f"when the run ends, the whole values of {type(task).__name__} would be gathered in the memory of"
            f" each process: {processes} x {size / 2**30:.1f} GiB, and this machine has"
            f" {memory / 2**30:.1f} GiB. Give gather_at_end=False in the strategy's configuration; a"
            " checkpoint has the values too, for from_checkpoint(path)"
        )


def host_memory() -> int:
    """Return the bytes of memory that this machine's processes may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else []
    with contextlib.suppress(OSError, ValueError):  # another system, or no limit: "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=2**62)


def check_dtypes(
    part: nn.Module,
    trained: Mapping[str, Tensor],
    allowed: Callable[[Collection[torch.dtype]], bool],
    reason: str,
) -> None:
    """Check the dtypes of trained parameters that a strategy exchanges together."""
    by_dtype: dict[torch.dtype, str] = {}
    for name, each in trained.items():
        by_dtype.setdefault(each.dtype, name)
    if not allowed(by_dtype):
        listed = " and ".join(
            f"{str(dtype).removeprefix('torch.')} ({clean_name(name)!r})" for dtype, name in by_dtype.items()
        )
        raise StrategyError(f"{type(part).__name__} has trained parameters of {listed}, {reason}")


def check_dimensions(task: nn.Module, otherwise: str = "") -> None:
    """Check that every parameter has at least one dimension, and each trained one an element.

    Args:
        otherwise: The end of the message: another way to deal with the parameter `{name}`.
    """
    for name, parameter in task.named_parameters():
        if parameter.ndim == 0:
            raise StrategyError(
                f"the parameter {name!r} is a scalar, which cannot be sharded; give it the shape (1,)"
                f"{otherwise.format(name=name)}"
            )
        shape = getattr(parameter, "ds_shape", parameter.shape)  # that of a parameter which ZeRO has divided
        if 0 in shape and parameter.requires_grad:
            raise StrategyError(
                f"the parameter {name!r} of shape {tuple(shape)} has no elements, which cannot be sharded."
                " Make it a buffer, leave it out, or use the strategy 'ddp'"
            )


def _is_share(parameter: Tensor) -> bool:
    """Return whether a parameter is a shard of FSDP's or of a DeepSpeed engine's."""
    return hasattr(parameter, "full_tensor") or hasattr(parameter, "_z3_optimizer")


def check_options(config: Any, positive: Sequence[str], flags: Sequence[str]) -> None:
    """Check that options are positive numbers or None, and that flags are True or False."""
    kind = type(config).__name__
    for name in positive:
        if (value := getattr(config, name)) is not None:
            number(f"{kind}({name}=...)", value, above=0, below=1e9)
    for name in flags:
        flag(f"{kind}({name}=...)", getattr(config, name))
