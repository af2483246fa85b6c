"""The shard of the data that a process reads, and the totals over all processes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset


class Shard(NamedTuple):
    """The shard of every global micro-batch that one process reads.

    Attributes:
        rank: The shard's number, from 0.
        size: The number of shards.
    """

    rank: int = 0
    size: int = 1


WHOLE = Shard()
"""All of the data, for one process."""


def can_be_divided(stream: object) -> bool:
    """Return whether a stream has a method `shard(num_shards, index)`, as Hugging Face's have."""
    is_stream = isinstance(stream, IterableDataset) or not hasattr(stream, "__getitem__")
    return is_stream and callable(getattr(stream, "shard", None))


def shards_of(stream: Any) -> float:
    """Return how many parts a stream can be divided into; infinity if it does not say so."""
    count: float = getattr(stream, "num_shards", math.inf)
    return count


class GlobalCounts(NamedTuple):
    """The totals over all processes in one global micro-batch, or in a window.

    Attributes:
        weight: The weight that the loss is divided by.
        samples: The number of samples.
        tokens: The number of tokens.
    """

    weight: float | Tensor
    samples: int
    tokens: int
