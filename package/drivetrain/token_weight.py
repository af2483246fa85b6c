"""Labels that a loss leaves out, and whether the weight of the loss counts the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.data import MicroBatch
from drivetrain.task import TaskModule
from drivetrain.window import StepResult

if TYPE_CHECKING:
    from drivetrain.engine import Engine

IGNORED = -100
"""The label that torch's `cross_entropy` leaves out by default."""

_LABELS = ("labels", "label", "targets", "target", "y")


def first_step(
    engine: Engine,
    train_step: Callable[[Sequence[MicroBatch]], StepResult],
    micro_batches: Sequence[MicroBatch],
) -> StepResult:
    """Make the first update of a program, and warn if a loss's weight is not the number of what it averages.

    A task without `loss_weight` is warned of labels that are left out. A given `loss_weight` is compared with
    the labels that `cross_entropy` or `nll_loss` counts, if the update calls one of them once for each
    micro-batch. A compiled step is not examined. The update waits for the device, since labels are read.
    """
    task = engine.task
    if not task.overrides("loss_weight"):
        _warn_without_weight(task, micro_batches)
    elif not engine.compilation.parts and any(_ignored(each.batch) for each in micro_batches):
        with _Counting() as counted:
            result = train_step(micro_batches)
        _compare(task, counted.targets, micro_batches)
        return result
    return train_step(micro_batches)


class _Counting(TorchFunctionMode):
    """Counts the targets that each mean of a classification loss is over."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):  # torch gives the other arguments by name here
            target = args[1]
            means = given["reduction"] == "mean" and given["weight"] is None
            if means and not target.is_floating_point():  # else it holds probabilities, and all count
                self.targets.append(int((target != given["ignore_index"]).sum()))
        return func(*args, **given)


def _compare(task: TaskModule, targets: list[int], micro_batches: Sequence[MicroBatch]) -> None:
    weights = [float(each.weight) for each in micro_batches if not each.stand_in]
    if len(targets) != len(weights):
        return
    for count, weight in zip(targets, weights, strict=True):
        if weight != count:
            warnings.warn(
                f"{type(task).__name__}.loss_weight gives {weight:g} for a micro-batch whose loss is a mean"
                f" over {count} labels, so that gradients over several micro-batches or ranks, and logged"
                f" means, are not those of one large batch. Leave out the labels of {IGNORED}, as the loss"
                " does; a causal model that shifts its labels counts labels[..., 1:] alone",
                stacklevel=2,
            )
            return


def _warn_without_weight(task: TaskModule, micro_batches: Sequence[MicroBatch]) -> None:
    """Warn where a loss is weighted by samples although its mean is over fewer of them, or over tokens."""
    for each in micro_batches:
        found = _ignored(each.batch)
        if found is None:
            continue
        warnings.warn(
            f"{found} has labels of {IGNORED}, which cross_entropy leaves out, and"
            f" {type(task).__name__} has no loss_weight: its losses are weighted by samples, so that"
            " gradients over several micro-batches or ranks, and logged means, are not those of one large"
            f" batch. Add to the task: def loss_weight(self, batch): return ({found} != {IGNORED}).sum() . A"
            f" causal model that shifts its labels needs ({found}[..., 1:] != {IGNORED}).sum(); for a mean"
            f" over samples return len({found})",
            stacklevel=2,
        )
        return


def _ignored(batch: Any) -> str | None:
    """The expression for the labels of a batch, if some are to be left out."""
    if isinstance(batch, Mapping):
        given = [(f"batch[{name!r}]", batch[name]) for name in _LABELS if name in batch]
    elif isinstance(batch, (list, tuple)) and len(batch) > 1:
        given = [("batch[-1]", batch[-1])]
    else:
        given = []
    for text, labels in given:
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            continue
        if bool((labels == IGNORED).any()):
            return text
    return None
