"""Finds the rank that the others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 10.0
"""Seconds of training per comparison: at 20 samples a second, precise to some 5 %."""


@dataclass(frozen=True)
class Comparison:
    """The ranks over an interval.

    Attributes:
        slowest: The rank with the longest work between the collectives.
        ratio: Its seconds of work over the median of all ranks.
        seconds: Its seconds of work.
        median: The median; of two ranks in the middle, the faster one.
        waiting: The share of time that ranks have waited, over all ranks.
    """

    slowest: int
    ratio: float
    seconds: float
    median: float
    waiting: float


class Stragglers:
    """Compares the work of the ranks, which is the time between collectives.

    The method follows MegaScale (Jiang et al., arXiv 2402.15627, section 5), which finds permanently slow
    machines by the time of each rank's computation, and the training of Llama 3 (Dubey et al., arXiv
    2407.21783, section 3.3), where one straggler slows thousands of others. A rank is reported when it was
    the slowest twice in a row, by more than a margin: once may be chance.

    Args:
        margin: How much slower than the median a rank must be, as a fraction of the median.
        copies: The number of neighbouring ranks that one rank represents.
    """

    def __init__(self, margin: float, copies: int = 1) -> None:
        self._margin = margin
        self._copies = copies
        self._before: list[tuple[float, float]] | None = None
        self._updates = 0
        self._suspect: int | None = None
        self._named: set[int] = set()

    def compare(
        self, shares: Sequence[tuple[float, float]], updates: int
    ) -> tuple[Comparison | None, str | None]:
        """Return the comparison since the last one, or None before enough time has passed; and a line to
        print, if one is due.

        Args:
            shares: For each rank, its seconds of work and of waiting so far.
            updates: The updates so far.
        """
        now = list(shares)
        if self._before is None or len(now) != len(self._before):
            self._before, self._updates = now, updates
            return None, None
        passed = [(own - o, waited - w) for (own, waited), (o, w) in zip(now, self._before, strict=True)]
        if min(sum(each) for each in passed) < LEAST or updates == self._updates:
            return None, None
        own = [each for each, _ in passed]
        slowest, median = own.index(max(own)), statistics.median_low(own)
        if median <= 0:
            return None, None
        waiting = sum(each for _, each in passed) / sum(map(sum, passed))
        found = Comparison(slowest * self._copies, max(own) / median, max(own), median, waiting)
        made, self._before, self._updates = updates - self._updates, now, updates
        return found, self._line(found, made)

    def _line(self, found: Comparison, updates: int) -> str | None:
        before, self._suspect = self._suspect, found.slowest if found.ratio > 1 + self._margin else None
        if self._suspect is None or self._suspect != before or self._suspect in self._named:
            return None
        self._named.add(self._suspect)
        took, others = found.seconds / updates, found.median / updates
        return (
            f"rank {found.slowest} is slow, and the others wait for it: between collectives it"
            f" takes {found.ratio:.2f} times as long as the median of all ranks ({took:.3g} s an update, not"
            f" {others:.3g} s). Look at what else runs there, at its clock and temperature, and whether its"
            " batches or its storage are others"
        )
