"""DeepSpeed's own optimizers in the form of torch's, as checkpoints hold them, and back.

DeepSpeed's Adam for the CPU and its fused one compute what torch's Adam and AdamW do, from the same two
moments. They count updates by a plain number, and know other settings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError

_ADAMS = frozenset({"DeepSpeedCPUAdam", "FusedAdam"})
_THEIRS = frozenset({"bias_correction", "step"})
"""Settings of a group of DeepSpeed's that torch's has not; the second is for its fused one."""

_OURS = {"amsgrad": False, "maximize": False}
"""Settings of a group of torch's that DeepSpeed's has not, or only so."""


def shell(optimizer: Optimizer) -> Optimizer:
    """An optimizer without parameters and states, of the kind that a checkpoint is told of.

    It is only there to be read and written: of DeepSpeed's kinds the destructor, which frees what the real
    one computes with, must not be called for it.
    """
    made: Optimizer
    if is_adam(optimizer):
        made = object.__new__(torch.optim.AdamW if _is_decoupled(optimizer) else torch.optim.Adam)
    else:
        made = object.__new__(_harmless(type(optimizer)))
        made.__dict__.update(optimizer.__dict__)
    made.param_groups, made.state = [], defaultdict(dict)
    return made


def is_adam(optimizer: Optimizer) -> bool:
    """Whether it is one of DeepSpeed's that computes the same as torch's Adam, or AdamW."""
    kind = type(optimizer)
    return (
        kind.__name__ in _ADAMS
        and kind.__module__.startswith("deepspeed.")
        and all(group["bias_correction"] for group in optimizer.param_groups)
    )


def told_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as a checkpoint holds them."""
    if not is_adam(optimizer):
        return dict(group)
    own = {name: each for name, each in group.items() if name not in _THEIRS}
    return {**own, **_OURS, "decoupled_weight_decay": _is_decoupled(optimizer)}


def told_slot(optimizer: Optimizer, slot: str, value: Any) -> Any:
    """A slot's value as a checkpoint holds it: the count of updates as a tensor."""
    if slot == "step" and is_adam(optimizer):
        return torch.tensor(float(value))
    return value


def check_settings(optimizer: Optimizer, given: Optimizer) -> None:
    """See that an optimizer can go on with the settings that a checkpoint has put into its shell.

    Raises:
        CheckpointError: One is something that DeepSpeed's does not do; names it.
    """
    if not is_adam(optimizer):
        return
    wanted = {**_OURS, "decoupled_weight_decay": _is_decoupled(optimizer)}
    for group in given.param_groups:
        for name, value in wanted.items():
            if bool(group.get(name, value)) != value:
                raise CheckpointError(
                    f"the checkpoint's optimizer has {name}={group[name]}, which DeepSpeed's"
                    f" {type(optimizer).__name__} has not. Resume with torch's Adam or AdamW, or load the"
                    " weights only"
                )


def taken_settings(
    optimizer: Optimizer, group: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a group takes over of its like in the shell."""
    every = not is_adam(optimizer)
    return {name: each for name, each in theirs.items() if name != "params" and (every or name in group)}


def taken_slot(optimizer: Optimizer, slot: str, value: Any) -> Any:
    """What an optimizer takes over of a slot of its shell."""
    if slot == "step" and isinstance(value, Tensor) and is_adam(optimizer):
        return int(value)
    return value


def _is_decoupled(optimizer: Any) -> bool:
    return bool(optimizer.adam_w_mode)


def _harmless(kind: type[Optimizer]) -> type[Optimizer]:
    """A kind of optimizer without a destructor, by the same name."""
    return type(kind.__name__, (kind,), {"__del__": lambda _: None, "__module__": kind.__module__})
