"""Corrections of torch_xla's norms, so that they behave as torch's do on a CPU.

torch updates the running variance with the batch's unbiased variance, and torch_xla with the biased one. And
torch_xla has no backward for a batch norm in evaluation mode, which frozen batch norms need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

_FIXED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The classes whose output is known; a subclass may compute something else."""


def correct_variances(model: nn.Module) -> None:
    """Update running variances with unbiased variances, and give batch norms a backward in evaluation mode.

    This applies to torch's batch norms and instance norms and their subclasses. It does not apply to running
    variances that a model passes to `torch.nn.functional.batch_norm` itself.
    """
    forget_corrections(model)  # a failed run may have left some
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_var is not None:
            _Correction(module)


def forget_corrections(model: nn.Module) -> None:
    for module in model.modules():
        for hook in list(module._forward_hooks.values()):
            if isinstance(hook, _Correction):
                hook.remove()


class _Correction:
    """Hooks around the forward of one norm; their few operations are traced with it."""

    def __init__(self, module: _NormBase) -> None:
        self._before: Tensor | None = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.keep),
            module.register_forward_hook(self),
        ]

    def keep(self, module: Any, inputs: Any) -> None:
        """Keep the running variance from before the step, if the module is still on XLA's device."""
        if module.training and module.running_var.device.type == "xla":
            self._before = module.running_var.clone()

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        """Scale the batch's contribution to the running variance by n / (n - 1), for n values.

        In evaluation mode with gradients, return the output of differentiable operations.
        """
        before, self._before = self._before, None
        if before is not None:
            added = module.running_var - before * (1 - _momentum(module))
            # By .data: backward saves the running variance, although it does not use it.
            module.running_var.data.add_(added, alpha=1 / (_values(module, output) - 1))

        fixed = type(module) in _FIXED and not module.training and module.running_var.device.type == "xla"
        if fixed and inputs and torch.is_grad_enabled():
            return _normalized(module, inputs[0]).to(output.dtype)
        return None

    def remove(self) -> None:
        for each in self._handles:
            each.remove()


def _normalized(module: Any, x: Tensor) -> Tensor:
    """Compute a batch norm in evaluation mode."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale = (module.running_var + module.eps).rsqrt()
    x = (x - module.running_mean.view(shape)) * scale.view(shape)
    return x * module.weight.view(shape) + module.bias.view(shape) if module.affine else x


def _momentum(module: Any) -> float | Tensor:
    """Return the weight of the batch's variance in the running one."""
    if module.momentum is not None:
        return float(module.momentum)
    batches = module.num_batches_tracked if isinstance(module, _BatchNorm) else None
    return 0.0 if batches is None else 1 / batches.to(module.running_var.dtype)  # the mean of all of them


def _values(module: Any, output: Tensor) -> int:
    """Return the number of values of a variance: a channel's in the whole batch, or in one sample."""
    if isinstance(module, _BatchNorm):
        return output.numel() // output.shape[1]
    return output.shape[1 - module._get_no_batch_dim() :].numel()
