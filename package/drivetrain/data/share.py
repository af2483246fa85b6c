"""Which part of the data a process reads, and what all processes read together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """The part of every round of batches that one process reads.

    Attributes:
        rank: Whose part, from 0.
        size: How many parts there are.
    """

    rank: int = 0
    size: int = 1


WHOLE = Share()
"""All of the data, for one process."""


class Everywhere(NamedTuple):
    """What all processes together have in one round of batches, or in a window.

    Attributes:
        weight: What the loss is a mean over.
        samples: The number of samples.
        tokens: The number of tokens.
    """

    weight: float | Tensor
    samples: int
    tokens: int
