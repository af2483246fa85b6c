"""The shard of the data that a process reads, and the totals over all processes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
