"""Reverting a module that DeepSpeed has taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.strategies.module_hooks import HookSnapshot


@contextmanager
def full_shapes(module: nn.Module) -> Iterator[None]:
    """Run the block with sharded parameters, which are empty, in their full shapes without using memory.

    An optimizer's groups may depend on shapes: weight decay is for matrices.
    """
    divided: list[Any] = [each for each in module.parameters() if hasattr(each, "ds_id")]
    before = [each.data for each in divided]
    for each in divided:
        each.data = torch.empty((), dtype=each.dtype, device=each.device).expand(each.ds_shape)
    try:
        yield
    finally:
        for each, data in zip(divided, before, strict=True):
            each.data = data


class ModulesBeforeZero:
    """The state of modules before DeepSpeed took them over.

    Args:
        module: The model, before `deepspeed.initialize`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._modules = [(each, set(vars(each)), HookSnapshot(each)) for each in module.modules()]

    def restore(self, value_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Give every module ordinary parameters on the host, and remove what DeepSpeed has added.

        Args:
            value_of: Returns the whole value of a parameter.
        """
        fresh: dict[nn.Parameter, nn.Parameter] = {}
        for module, attributes, hooks in self._modules:
            parameters: dict[str, nn.Parameter | None] = {}
            for name, each in dict.items(module._parameters):
                if each is not None and each not in fresh:  # tied ones stay tied
                    fresh[each] = nn.Parameter(value_of(each).cpu(), requires_grad=each.requires_grad)
                parameters[name] = None if each is None else fresh[each]
            module.__dict__["_parameters"] = parameters
            hooks.remove_others("deepspeed")
            added = [each for each in vars(module) if each.startswith("ds_") or each in _ADDED]
            for name in set(added) - set(attributes):
                del module.__dict__[name]
        self._root.to("cpu")


_ADDED = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "post_bwd_fn",
        "pre_bwd_fn",
    }
)
"""Attributes that stage 3 adds to modules, in addition to those that begin with "ds_"."""
