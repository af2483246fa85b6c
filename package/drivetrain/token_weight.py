"""Labels that a loss leaves out, about which the default weight of the loss knows nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from drivetrain.data import MicroBatch
from drivetrain.task import TaskModule

IGNORED = -100
"""The label that torch's `cross_entropy` leaves out by default."""

_LABELS = ("labels", "label", "targets", "target", "y")


def warn_of_ignored_labels(task: TaskModule, micro_batches: Iterable[MicroBatch]) -> None:
    """Warn where a loss is weighted by samples although its mean is over tokens, as far as labels show.

    The labels of the first update are read for this, so it waits for the device once.
    """
    if task.overrides("loss_weight"):
        return
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
    """The expression for the labels of a batch, one for each token, if some are to be left out."""
    if isinstance(batch, Mapping):
        given = [(f"batch[{name!r}]", batch[name]) for name in _LABELS if name in batch]
    elif isinstance(batch, (list, tuple)) and len(batch) > 1:
        given = [("batch[-1]", batch[-1])]
    else:
        given = []
    for text, labels in given:
        if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
            continue
        if bool((labels == IGNORED).any()):
            return text
    return None
