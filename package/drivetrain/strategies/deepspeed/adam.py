"""Conversion of DeepSpeed's Adam to torch's form, which checkpoints use, and back.

DeepSpeed's CPU Adam and fused Adam compute the same as torch's Adam and AdamW, from the same two moments.
They count steps by a plain number, and have other settings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import CheckpointError

_ADAMS = frozenset({"DeepSpeedCPUAdam", "FusedAdam"})
_THEIRS = frozenset({"bias_correction", "step"})
"""Group settings that only DeepSpeed's Adam has; "step" belongs to the fused one."""

_OURS = {"amsgrad": False, "maximize": False}
"""Group settings of torch's Adam that DeepSpeed's lacks, or supports only with these values."""


def state_carrier(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer without parameters and states, of the type that a checkpoint uses.

    It carries state to and from a checkpoint. It has no destructor: DeepSpeed's would free memory that
    the real optimizer uses.
    """
    made: Optimizer
    if is_adam(optimizer):
        made = object.__new__(torch.optim.AdamW if _is_decoupled(optimizer) else torch.optim.Adam)
    else:
        made = object.__new__(_without_destructor(type(optimizer)))
        made.__dict__.update(optimizer.__dict__)
    made.param_groups, made.state = [], defaultdict(dict)
    return made


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is DeepSpeed's and computes the same as torch's Adam or AdamW."""
    kind = type(optimizer)
    return (
        kind.__name__ in _ADAMS
        and kind.__module__.startswith("deepspeed.")
        and all(group["bias_correction"] for group in optimizer.param_groups)
    )


def checkpoint_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings in the form of a checkpoint."""
    if not is_adam(optimizer):
        return dict(group)
    own = {name: each for name, each in group.items() if name not in _THEIRS}
    return {**own, **_OURS, "decoupled_weight_decay": _is_decoupled(optimizer)}


def checkpoint_slot(optimizer: Optimizer, slot: str, value: Any) -> Any:
    """Return a slot's value in the form of a checkpoint: the count of steps is a tensor."""
    if slot == "step" and is_adam(optimizer):
        return torch.tensor(float(value))
    return value


def check_settings(optimizer: Optimizer, given: Optimizer) -> None:
    """Check that an optimizer supports the settings that a checkpoint has put into its carrier.

    Raises:
        CheckpointError: DeepSpeed's optimizer does not support one; the message names it.
    """
    if not is_adam(optimizer):
        return
    wanted = {**_OURS, "decoupled_weight_decay": _is_decoupled(optimizer)}
    for group in given.param_groups:
        for name, value in wanted.items():
            if bool(group.get(name, value)) != value:
                raise CheckpointError(
                    f"the checkpoint's optimizer has {name}={group[name]}, which DeepSpeed's"
                    f" {type(optimizer).__name__} does not support. Resume with torch's Adam or AdamW, or"
                    " load only the weights"
                )


def native_settings(
    optimizer: Optimizer, group: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a group takes from its counterpart in the carrier."""
    every = not is_adam(optimizer)
    return {name: each for name, each in theirs.items() if name != "params" and (every or name in group)}


def native_slot(optimizer: Optimizer, slot: str, value: Any) -> Any:
    """Return a slot's value from the carrier in the optimizer's own form."""
    if slot == "step" and isinstance(value, Tensor) and is_adam(optimizer):
        return int(value)
    return value


def _is_decoupled(optimizer: Any) -> bool:
    return bool(optimizer.adam_w_mode)


def _without_destructor(kind: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of an optimizer's type with the same name and no destructor."""
    return type(kind.__name__, (kind,), {"__del__": lambda _: None, "__module__": kind.__module__})
