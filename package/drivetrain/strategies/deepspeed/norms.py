"""Normalisation layers that compute in float32, with parameters that DeepSpeed keeps in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_KINDS = (_NormBase, nn.LayerNorm, nn.GroupNorm)
"""torch's kernels for these accept weights in float32 with any input. Other weights must have the dtype of
the input, or of the running means, which DeepSpeed leaves in float32."""


class WideNorms:
    """Hooks that make norms read their weights in float32.

    Gradients go through the cast. A forward hook of each norm sets the cast weights as attributes, which hide
    the real parameters, which stay where DeepSpeed gathers and frees them.

    Args:
        module: The model, after DeepSpeed has added its hooks, which gather the weights.
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [each for each in module.modules() if isinstance(each, _KINDS)]
        self._handles: list[Any] = []
        for norm in norms:
            if any(each.itemsize < 4 for each in norm.parameters(recurse=False)):
                self._handles.append(norm.register_forward_pre_hook(_widen))
                self._handles.append(norm.register_forward_hook(_uncover, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for each in self._handles:
            each.remove()
        self._handles = []


def _widen(norm: nn.Module, _inputs: Any) -> None:
    means = getattr(norm, "running_mean", None)
    dtype = torch.float32 if means is None else means.dtype
    for name, parameter in dict.items(norm._parameters):
        if parameter is not None:
            norm.__dict__[name] = parameter.to(dtype)  # attribute lookup finds it before the parameter


def _uncover(norm: nn.Module, _inputs: Any, _outputs: Any) -> None:
    for name in dict.keys(norm._parameters):
        norm.__dict__.pop(name, None)
