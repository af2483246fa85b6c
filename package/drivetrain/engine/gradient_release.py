"""Updates within backward: each parameter is updated as soon as its gradient exists, which is then freed.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), ACL 2024; the
hooks are torch's `register_post_accumulate_grad_hook`. Gradients are then never in memory all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.optimizer_step import step
from drivetrain.task.optim.state import WEIGHT_UPDATES

_PACKAGES = ("torch.optim.", "torchao.optim.")
"""Packages whose optimizers compute a parameter's update from its gradient and state alone."""


class GradientRelease:
    """Makes an optimizer's updates within backward, until `remove`.

    The optimizer itself makes them, one parameter at a time, so that its state, groups and rates are in their
    usual places. Its step after backward finds no gradient and does nothing.

    Args:
        optimizer: The run's only optimizer.
        update: Returns a value that differs from one update to the next.
        names: The names of its parameters.

    Raises:
        ConfigError: The optimizer does not update each parameter by itself. Within backward: a parameter's
            gradient comes in parts.
    """

    def __init__(self, optimizer: Optimizer, update: Callable[[], object], names: Mapping[Any, str]) -> None:
        kind = type(optimizer)
        if not f"{kind.__module__}.".startswith(_PACKAGES):
            raise ConfigError(
                f"release_gradients with {kind.__name__}: it may need the gradients of all parameters at"
                " once. Use an optimizer of torch.optim or torchao, or release_gradients=False"
            )
        if any(group.get(WEIGHT_UPDATES, "nearest") != "nearest" for group in optimizer.param_groups):
            raise ConfigError(
                "release_gradients with weights of 16 bits that take updates in float32: these are made of"
                " many parameters at once. Use a precision with updates='nearest', or release_gradients=False"
            )
        self._optimizer = optimizer
        self._now = update
        self._names = names
        self._updated: dict[Tensor, object] = {}
        self._group = {
            each: index for index, group in enumerate(optimizer.param_groups) for each in group["params"]
        }
        self._handles: Sequence[Any] = [
            each.register_post_accumulate_grad_hook(self._update) for each in self._group
        ]

    def _update(self, parameter: Tensor) -> None:
        now = self._now()
        if parameter in self._updated and self._updated[parameter] == now:
            raise ConfigError(
                f"release_gradients: backward gave a second gradient of {self._names.get(parameter)!r}, after"
                " its update with the first. A part of the step is gone through apart from the rest, as by"
                " torch.utils.checkpoint.checkpoint(..., use_reentrant=True) or a backward of your own. Use"
                " use_reentrant=False, MemoryConfig(activation_checkpointing=...) or release_gradients=False"
            )
        self._updated[parameter] = now
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**groups[self._group[parameter]], "params": [parameter]}]
        try:
            with torch.no_grad():
                step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def remove(self) -> None:
        """Let backward accumulate gradients again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._group, self._updated = (), {}, {}
