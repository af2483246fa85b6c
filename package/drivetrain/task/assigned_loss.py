"""The weight of a batch in a loss of torch that a task was assigned, read from the loss's settings.

torch's classification losses divide by the class weights of the labels that are not ignored. A loss with
`reduction="sum"` divides by nothing.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.task.output import wide_dtype

_OVER_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)


def is_sum(loss: nn.Module | None) -> bool:
    return loss is not None and vars(loss).get("reduction") == "sum"


def is_mean_over_labels(loss: nn.Module | None) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Return whether a loss divides by the class weights of its labels, without those that it ignores."""
    return isinstance(loss, _OVER_CLASSES) and loss.reduction == "mean"


def counts_labels(loss: nn.Module | None, own_step: bool) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Return whether the weight of a batch is the total of its labels.

    With default settings, a `training_step` of the task or a `forward` of the loss's class decides by itself
    which labels the loss gets, and samples are counted.
    """
    if not is_mean_over_labels(loss):
        return False
    is_own = own_step or _has_own_forward(loss)
    return not is_own or loss.weight is not None or loss.ignore_index != -100


def _has_own_forward(loss: nn.Module) -> bool:
    return type(loss).forward not in [each.forward for each in _OVER_CLASSES]


def total_of_labels(loss: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> float | Tensor:
    """Return what a loss of `is_mean_over_labels` divides by.

    Args:
        target: Labels of any shape, or probabilities of shape (samples, classes, ...). Probabilities are
            never ignored, and their mean has no weights.
    """
    if target.is_floating_point():
        return target.numel() / target.shape[min(1, target.ndim - 1)]
    weight = loss.weight
    if weight is None:
        if target.is_cpu and target.numel() < 1000:  # then quicker than two operations of torch
            return target.numel() - target.flatten().tolist().count(loss.ignore_index)
        return (target != loss.ignore_index).sum()
    target = target.to(weight.device, non_blocking=True)  # a copy of the weights to the host would wait
    counted = target != loss.ignore_index
    return (weight[target.where(counted, 0)] * counted).sum(dtype=wide_dtype(weight.device))


def check_assigned_loss(task: nn.Module, loss: nn.Module, overridden: set[str]) -> None:
    """Check that the settings of an assigned loss allow the same gradient for any split of a batch.

    Args:
        overridden: Which of `training_step` and `loss_weight` the task defines itself.
    """
    title = f"{type(task).__name__}.loss, {type(loss).__name__}"
    reduction = vars(loss).get("reduction")
    if reduction == "none" and "training_step" not in overridden:
        raise ConfigError(
            f"{title}(reduction='none'), gives a loss for each sample, and a step needs one number. Use"
            " reduction='mean', or define loss(self, outputs, batch) and reduce them there"
        )
    if reduction == "sum" and (own := overridden & {"training_step", "loss_weight"}):
        raise ConfigError(
            f"{title}(reduction='sum'), with {' and '.join(sorted(own))} of the task: the sum of a step's"
            " losses is exact in the default training_step, weighted by samples. Use reduction='mean', or"
            " define loss(self, outputs, batch), a mean, and loss_weight(self, batch), its number of items"
        )
    counts = any(counts_labels(each, own_step=True) for each in loss.modules())
    if "loss_weight" not in overridden and counts and _has_own_forward(loss):
        raise ConfigError(
            f"{title}, has class weights or an ignore_index, and a forward of its own: what its mean divides"
            " by is not known. Define loss_weight(self, batch) in the task to return it"
        )
