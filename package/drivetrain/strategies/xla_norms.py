"""Norms under XLA's strategies, as torch has them on a CPU.

torch takes the unbiased variance of a batch into the running one, and torch_xla the biased one, with which
it normalizes. And torch_xla has no backward of a batch norm in evaluation mode, as one that is not to learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

_FIXED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Whose output is known, where a class of one's own may do more to it."""


def correct_variances(model: nn.Module) -> None:
    """Have the norms of a model that keep a running variance take the unbiased one of each batch into it; and
    batch norms in evaluation mode have a backward.

    Those are torch's batch norms and instance norms, and classes made of them; not what a model keeps
    itself by `torch.nn.functional.batch_norm`.
    """
    forget_corrections(model)  # a run that failed has left its own
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_var is not None:
            _Correction(module)


def forget_corrections(model: nn.Module) -> None:
    """Take out what `correct_variances` has put in."""
    for module in model.modules():
        for hook in list(module._forward_hooks.values()):
            if isinstance(hook, _Correction):
                hook.remove()


class _Correction:
    """Hooks around the forward of one norm, whose few operations are traced with it.

    Args:
        module: The norm.
    """

    def __init__(self, module: _NormBase) -> None:
        self._before: Tensor | None = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.keep),
            module.register_forward_hook(self),
        ]

    def keep(self, module: Any, inputs: Any) -> None:
        """Keep the running variance that an update is made of; a failed run's module may be elsewhere now."""
        if module.training and module.running_var.device.type == "xla":
            self._before = module.running_var.clone()

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        """Bring what the batch has added to its size: n / (n - 1) of it, of n values.

        In evaluation mode, with gradients, give the output by operations that have them.
        """
        before, self._before = self._before, None
        if before is not None:
            added = module.running_var - before * (1 - _momentum(module))
            # By .data, since backward is given the running variance too, without a use for it.
            module.running_var.data.add_(added, alpha=1 / (_values(module, output) - 1))

        fixed = type(module) in _FIXED and not module.training and module.running_var.device.type == "xla"
        if fixed and inputs and torch.is_grad_enabled():
            return _normalized(module, inputs[0]).to(output.dtype)
        return None

    def remove(self) -> None:
        """Take the hooks out."""
        for each in self._handles:
            each.remove()


def _normalized(module: Any, x: Tensor) -> Tensor:
    """What a batch norm in evaluation mode computes."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale = (module.running_var + module.eps).rsqrt()
    x = (x - module.running_mean.view(shape)) * scale.view(shape)
    return x * module.weight.view(shape) + module.bias.view(shape) if module.affine else x


def _momentum(module: Any) -> float | Tensor:
    """How much of a batch's variance was taken."""
    if module.momentum is not None:
        return float(module.momentum)
    batches = module.num_batches_tracked if isinstance(module, _BatchNorm) else None
    return 0.0 if batches is None else 1 / batches.to(module.running_var.dtype)  # the mean of all of them


def _values(module: Any, output: Tensor) -> int:
    """Of how many values a variance is: a channel's of the whole batch, or of one sample."""
    if isinstance(module, _BatchNorm):
        return output.numel() // output.shape[1]
    return output.shape[1 - module._get_no_batch_dim() :].numel()
