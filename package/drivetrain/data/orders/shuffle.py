"""A shuffled order of many indices by a formula: no list is kept, and any position is found at once.

The formula is a Feistel network with a pseudo-random round function, which is a permutation of 2**b numbers
(Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988), applied
until the result is an index: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002, method 2). The two halves of an odd number of bits differ by one bit, and take turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from drivetrain.core.random_streams import mix

LARGE = 1 << 20
"""Sets of more samples are shuffled by the formula, others by `torch.randperm`."""

_ROUNDS = 6
"""Even, so that the halves end where they were. Of ideal round functions four are enough."""

_BLOCK = 1 << 13
"""Indices that are made at a time: few calls of numpy for each, and arrays that stay in a core's cache."""


class FormulaOrder:
    """A permutation of the numbers below a length; slices of it are tensors.

    Args:
        length: The length, at least 2.
        seed: The seed.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        bits = (length - 1).bit_length()
        self._halves = bits // 2, bits - bits // 2
        self._keys = [np.uint64(mix(seed, number)) for number in range(_ROUNDS)]
        self._number = -1
        self._block = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: slice) -> torch.Tensor:
        start, stop, _ = positions.indices(self._length)
        parts = []
        while start < stop:
            number, offset = divmod(start, _BLOCK)
            part = self._made(number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return torch.cat(parts) if parts else self._block[:0]

    def _made(self, number: int) -> torch.Tensor:
        """Return a block of the order; the last one is kept."""
        if number != self._number:
            first = number * _BLOCK
            positions = np.arange(first, min(first + _BLOCK, self._length), dtype=np.uint64)
            found = self._permuted(positions)
            while (outside := np.flatnonzero(found >= self._length)).size:
                found[outside] = self._permuted(found[outside])
            self._number, self._block = number, torch.from_numpy(found.astype(np.int64))
        return self._block

    def _permuted(self, numbers: Any) -> Any:
        low, high = self._halves
        left, right = numbers >> np.uint64(high), numbers & np.uint64((1 << high) - 1)
        for key in self._keys:
            # The left half has `low` bits, and the right one `high`. The constants are SplitMix64's.
            mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ (mixed >> np.uint64(64 - low))
            low, high = high, low
        return left << np.uint64(high) | right
