"""Labels that a loss ignores, and the check that the loss's weight ignores them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.core.messages import logger
from drivetrain.data import MicroBatch
from drivetrain.engine.engine import Engine
from drivetrain.task.assigned_loss import IGNORED
from drivetrain.task.task import TaskModule, measure_of

_LOG = logger(__name__)

_LABELS = ("labels", "label", "targets", "target", "y")


@contextmanager
def checking_loss_weight(engine: Engine, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Run the block, the first step of a program, and warn if `loss_weight` does not match the loss.

    A task without `loss_weight` gets a warning about ignored labels. An existing `loss_weight` is compared
    with the number of labels that `cross_entropy` or `nll_loss` counts, if the step calls one of them once
    for each micro-batch. A compiled step is not examined. The step waits for the device, because labels are
    read.
    """
    task = engine.task
    if measure_of(task).weight is None:
        _warn_without_weight(task, micro_batches)
    elif not engine.compilation.parts and any(_ignored(each.batch) for each in micro_batches):
        with counted_targets() as counts:
            yield
        _compare(task, counts, micro_batches)
        return
    yield


@contextmanager
def counted_targets() -> Iterator[list[int]]:
    """Count the targets of each mean of a classification loss while the block runs; yields the counts."""
    with _Counting() as counting:
        yield counting.targets


class _Counting(TorchFunctionMode):
    """Counts the targets of each mean of a classification loss."""

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
    weights = [float(each.weight) for each in micro_batches if not each.is_placeholder]
    if len(targets) != len(weights):
        return
    for count, weight in zip(targets, weights, strict=True):
        if weight != count:
            _LOG.warning(
                f"{type(task).__name__}.loss_weight gives {weight:g} for a micro-batch whose loss is a mean"
                f" over {count} labels, so that gradients over several micro-batches or ranks, and logged"
                f" means, are not those of one large batch. Leave out the labels of {IGNORED}, as the loss"
                " does; a causal model that shifts its labels counts labels[..., 1:] alone"
            )
            return


def _warn_without_weight(task: TaskModule, micro_batches: Sequence[MicroBatch]) -> None:
    """Warn if a loss is weighted by samples but is a mean over fewer of them, or over tokens."""
    for each in micro_batches:
        found = _ignored(each.batch)
        if found is None:
            continue
        _LOG.warning(
            f"{found} has labels of {IGNORED}, which cross_entropy leaves out, and"
            f" {type(task).__name__} has no loss_weight: its losses are weighted by samples, so that"
            " gradients over several micro-batches or ranks, and logged means, are not those of one large"
            f" batch. Add to the task: def loss_weight(self, batch): return ({found} != {IGNORED}).sum() . A"
            f" causal model that shifts its labels needs ({found}[..., 1:] != {IGNORED}).sum(); for a mean"
            f" over samples return len({found})"
        )
        return


def _ignored(batch: Any) -> str | None:
    """Return the Python expression of the batch entry that holds labels, if some labels are ignored."""
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
