"""Python and C calls of a step, as `sys.setprofile` counts them."""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from types import FrameType


class CallCounter:
    """A clock that counts calls between two losses in place of seconds.

    Attributes:
        counts: Python calls and C calls up to each loss.
    """

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []
        self._python = self._c = 0

    def __call__(self) -> None:
        """Note the counts; its own call, and those in it, are none of the contestant's."""
        sys.setprofile(None)
        self.counts.append((self._python, self._c))
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._python += frame.f_code is not CallCounter.__call__.__code__
        elif event == "c_call":
            self._c += argument is not sys.setprofile

    def per_step(self, start: int, count: int) -> dict[str, int]:
        """The median step's calls, of those between two losses.

        Args:
            start: The first loss.
            count: How many steps.
        """
        sys.setprofile(None)
        cuts = self.counts[start : start + count + 1]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(cuts)]
        python, c = (statistics.median_low(column) for column in zip(*steps, strict=True))
        return {"python": python, "c": c}
