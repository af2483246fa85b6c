"""Whole weights in a task while a run goes on, so that any rank can call the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from drivetrain.strategies.base import Strategy
from drivetrain.strategies.module_hooks import without_hooks

_SHARDING = ("torch.distributed", "deepspeed", "drivetrain.strategies")
"""The packages whose hooks exchange weights between ranks, or note that they do."""

_MARK = "_is_fsdp_managed_module"
"""torch's mark of a sharded module; transformers' `generate` then waits for the other ranks."""


@contextmanager
def whole_weights(strategy: Strategy, task: nn.Module) -> Iterator[None]:
    """Run the block with whole weights in place of sharded ones, so that a forward exchanges nothing.

    Each weight keeps its dtype and device. All processes must enter the block together.

    Args:
        task: The prepared task.
    """
    modules = list(task.modules())
    tables = [dict(dict.items(each._parameters)) for each in modules]  # DeepSpeed's gather what is read
    whole: dict[Any, nn.Parameter | None] = {None: None}  # tied parameters stay tied
    for parameter in [each for table in tables for each in table.values()]:
        if parameter is not None and parameter not in whole:
            value = strategy.full_tensor(parameter)
            whole[parameter] = parameter
            if value is not parameter:
                value = value.detach().to(parameter.device, parameter.dtype)
                whole[parameter] = nn.Parameter(value, parameter.requires_grad)
    before = [each._parameters for each in modules]
    marked = [each for each in modules if vars(each).get(_MARK)]
    try:
        for each, table in zip(modules, tables, strict=True):
            each.__dict__["_parameters"] = {name: whole[parameter] for name, parameter in table.items()}
        for each in marked:
            vars(each)[_MARK] = False
        _note_flat_weights(modules)
        with without_hooks(modules, _SHARDING):
            yield
    finally:
        for each, parameters in zip(modules, before, strict=True):
            each.__dict__["_parameters"] = parameters
        for each in marked:
            vars(each)[_MARK] = True
        _note_flat_weights(modules)


def _note_flat_weights(modules: list[nn.Module]) -> None:
    for each in modules:
        if isinstance(each, nn.RNNBase):  # it computes with a list of its parameters
            for name, parameter in dict.items(each._parameters):
                setattr(each, name, parameter)
