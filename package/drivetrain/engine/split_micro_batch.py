"""Splits a micro-batch into several, each with its loss weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import DataError
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size
from drivetrain.data.counting import Count
from drivetrain.data.transfer import MicroBatch

_WEIGHT_TOLERANCE = 0.01
"""The relative difference allowed between the parts' weights and the whole's: 16-bit sums are that coarse."""


def weighted_parts(
    micro_batch: MicroBatch, batches: Sequence[Batch], hosts: Sequence[Batch], weigh: Count | None
) -> list[MicroBatch]:
    """Return the parts of a micro-batch with their weights.

    Args:
        hosts: The parts as the data gave them, or None for each. They are weighed like the whole; in a 16-bit
            copy a sum of weights may be rounded, or infinite.
        weigh: Returns a part's loss weight; None uses its number of samples.
    """
    samples = [batch_size(each) or 0 for each in batches]
    weights: Sequence[float] = samples
    if weigh is not None:
        given = [weigh(part if host is None else host) for part, host in zip(batches, hosts, strict=True)]
        weights = _checked(_numbers(given), samples, micro_batch)
    return [
        micro_batch._replace(batch=batch, weight=weight, samples=number, tokens=0, host=kept)
        for batch, weight, number, kept in zip(batches, weights, samples, hosts, strict=True)
    ]


def _numbers(weights: Sequence[Any]) -> list[float]:
    """Return the weights on the host; waits for them, because parts of weight zero are left out."""
    if any(isinstance(each, Tensor) for each in weights):
        numbers: list[float] = torch.stack([torch.as_tensor(each).reshape(()) for each in weights]).tolist()
        return numbers
    return [float(each) for each in weights]


def _checked(weights: Sequence[float], samples: Sequence[int], micro_batch: MicroBatch) -> Sequence[float]:
    for weight, number in zip(weights, samples, strict=True):
        if not 0 <= weight < math.inf:
            raise DataError(
                f"loss_weight gave {weight} for a part of {number} of a batch's {sum(samples)} samples; a"
                " weight is a number of samples or tokens, 0 or more"
            )
    whole, parts = micro_batch.weight, sum(weights)
    if isinstance(whole, Tensor) or micro_batch.is_placeholder:  # on an accelerator, or of another batch
        return weights
    if abs(parts - whole) > _WEIGHT_TOLERANCE * max(parts, whole):
        raise DataError(
            f"loss_weight gave {whole:g} for a batch of {sum(samples)} samples and {parts:g} for its"
            f" {len(weights)} parts together. Where batches are run in parts it must be a sum over samples,"
            " such as their number of tokens"
        )
    return weights
