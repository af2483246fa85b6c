"""The package DeepSpeed: importing it without its output, and connecting it to the job's process group."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, MissingDependencyError, StrategyError
from drivetrain.strategies.base import Support, installed
from drivetrain.task.optim.muon import CombinedOptimizer

_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Elementwise optimizers: the step of a number depends only on its own gradients and state."""


_connected: Any = None


def library(device: str) -> Any:
    """Import DeepSpeed for a kind of device.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        StrategyError: DeepSpeed was imported before for another kind of device.
    """
    if not installed("deepspeed", "deepspeed"):
        raise MissingDependencyError("deepspeed", "deepspeed", "strategy 'deepspeed'")
    with environment(DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device)), quiet():
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        there = get_accelerator().device_name()
    if there != device:
        raise StrategyError(
            f"DeepSpeed has chosen {there!r} in this program, but the strategy runs on {device!r}. Set the"
            f" environment variable DS_ACCELERATOR={device}, or use the other device"
        )
    # DeepSpeed calls functions by deprecated names in every step.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed asks this table for one operator alone, of inference on a CPU, which it would compile for half
    # a minute before any training. To fill the table it would try the compiler on every operator.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    return deepspeed


def float16(device: str) -> Support:
    """Return whether DeepSpeed supports float16 on a kind of device."""
    library(device)
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        return Support(True)
    return Support(
        False,
        f"DeepSpeed does not support float16 on this {device.upper()}; use 'bf16-mixed', 'ddp' or 'fsdp'",
    )


def connect(deepspeed: Any) -> None:
    """Connect DeepSpeed to the job's process group, and clear its references to an earlier one."""
    global _connected
    world = torch.distributed.group.WORLD
    if _connected is world:
        return
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    for name in (
        "_WORLD_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_TENSOR_MODEL_PARALLEL_GROUP",
    ):
        setattr(groups, name, None)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP = {}
    with quiet():
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
    _connected = world


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run the block without DeepSpeed's prints, warnings and logs."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Run the block with these variables set, then restore the whole environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def check_optimizer(optimizer: Optimizer, allowed: bool) -> None:
    """Check that an optimizer computes the same on flat pieces as on parameters.

    Args:
        optimizer: The optimizer.
        allowed: Whether the user says that it does.

    Raises:
        ConfigError: It depends on a parameter's shape, is not known to be elementwise, or is DeepSpeed's own.
    """
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    for each in parts:
        if type(each).__module__.startswith("deepspeed."):
            raise ConfigError(
                f"{type(each).__name__} is DeepSpeed's own, and its state fits no other strategy. Use torch's"
                " optimizers: Adam and AdamW compute the same, by a fused kernel on a CPU too"
            )
    if allowed:
        return
    unknown = [name for name in (type(each).__name__ for each in parts) if name not in _ELEMENTWISE]
    if not unknown:
        return
    raise ConfigError(
        "DeepSpeed concatenates parameters to flat pieces for the optimizer, and"
        f" {unknown[0]} is not known to compute the same on them. Allowed are"
        f" {', '.join(sorted(_ELEMENTWISE))}; any with strategy 'ddp'. If {unknown[0]} is elementwise, give"
        ' DeepSpeedConfig(config={"zero_allow_untested_optimizer": True})'
    )
