"""Count the samples, the tokens and the weight of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size
from drivetrain.data.rank_rounds import SharedBatch
from drivetrain.data.shard import GlobalCounts
from drivetrain.data.skipped_batches import BAD
from drivetrain.data.transfer import MicroBatch

Count = Callable[[Batch], Any]


@dataclass(frozen=True)
class Measure:
    """Functions that count a batch; None uses the default.

    Attributes:
        weight: Returns the batch's weight in the loss; the default is the number of samples.
        tokens: Returns the number of tokens; the default does not count them.
    """

    weight: Count | None = None
    tokens: Count | None = None


def count_batch(shared: SharedBatch, measure: Measure, skips: bool, title: Callable[[], str]) -> MicroBatch:
    """Count a process's batch of a round.

    Args:
        shared: The batch.
        measure: What counts it.
        skips: Whether bad batches are left out.
        title: Names the batch, for errors.

    Raises:
        DataError: The batch is of an unknown kind, or its weight or its tokens are no such numbers.
    """
    batch, advance, samples, is_placeholder, known, _ = shared
    if batch is BAD:
        return MicroBatch(None, 0.0, 0, 0, advance, True, None, not is_placeholder)
    samples = batch_size(batch) if samples is None else samples
    if samples is None:
        raise _unknown_kind(batch, title())
    weight = samples if measure.weight is None else _weight(measure.weight(batch), title)
    tokens = 0 if measure.tokens is None else _tokens(measure.tokens(batch))
    global_counts = None
    if skips:
        weight = float(weight)  # also one on a device: a process with a bad batch has no tensor there
    elif known is not None and measure.weight is None and measure.tokens is None:
        global_counts = GlobalCounts(known, known, 0)
    if is_placeholder:  # multiplied, because a weight may be a tensor on the device
        weight, samples, tokens = weight * 0, 0, 0
    return MicroBatch(batch, weight, samples, tokens, advance, is_placeholder, global_counts)


def _unknown_kind(batch: Batch, title: str) -> DataError:
    inside = ""
    if isinstance(batch, (list, tuple)):
        inside = f" of {', '.join(sorted({type(value).__name__ for value in batch}))}"
    return DataError(
        f"{title} is a {type(batch).__name__}{inside} with no tensor whose first dimension could count"
        " samples. A batch is a tensor, a mapping, a sequence or a dataclass of tensors; use a collate_fn"
        " that makes one"
    )


def _weight(given: Any, title: Callable[[], str]) -> float | Tensor:
    # A weight on an accelerator stays there: reading it would be a host sync in every step.
    if isinstance(given, Tensor) and given.device.type != "cpu" and given.dtype != torch.bool:
        return given
    try:
        weight = float(_item(given))
    except (TypeError, ValueError, RuntimeError):
        shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise ConfigError(
            f"loss_weight gave {shown[:80]}; it must return one number, the weight of the batch's loss"
        ) from None
    if not 0 <= weight < math.inf:
        raise DataError(f"loss_weight gave {weight} for {title()}; it counts samples or tokens, at least 0")
    return weight


def _tokens(given: Any) -> int:
    """Return what `tokens` gave as a whole number."""
    try:
        number = _item(given)
        if (whole := int(number)) == number and whole >= 0:
            return whole
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    shown = f"a tensor of shape {tuple(given.shape)}" if getattr(given, "ndim", 0) else f"{given!r}"
    raise DataError(f"tokens gave {shown[:80]}; it must return a whole number of tokens, at least 0")


def _item(given: Any) -> Any:
    """Return a number, or the number in an array or a tensor. A truth value is none: it counts nothing."""
    number = given.item() if hasattr(given, "item") else given
    if isinstance(number, bool):
        raise TypeError
    return number
