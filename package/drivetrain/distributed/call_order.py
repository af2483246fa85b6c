"""The order of a rank's exchanges as a checksum, which travels with what the ranks exchange anyway.

Collectives match by their order alone. If ranks run different parts of a model, one rank's weights or
gradients are taken for those of another part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from zlib import crc32

from drivetrain.core.errors import StrategyError

_KEPT = 10_000
"""Names of the last calls that a rank can still report."""

_SHOWN = 100
"""Names of the last calls that a failed rank writes beside its stacks."""

_REMEDY = (
    "Weights and gradients are matched by their order alone, so a rank has mixed up those of two parts;"
    " what was saved before is right. Let all ranks run the same blocks, use the same parameters"
    " and step the same optimizers, in one order. Draw what is left out (LayerDrop, early exit) from a seed"
    " that all ranks share, or add the sum of the unused outputs or parameters to the loss, times zero;"
    " DeepSpeed needs the latter. Or use strategy 'ddp' with DDPConfig(find_unused_parameters=True)"
)


class CallOrder:
    """The calls of a rank that the other ranks must make in the same order: their checksum and last names.

    Attributes:
        digest: The checksum of all names so far.
        tell: Called when a call is made for the first time, before it is made.
    """

    def __init__(self) -> None:
        self.digest = self._made = 0
        self.tell: Callable[[], object] = int
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self._known: set[str] = set()

    def note(self, call: str) -> None:
        """Note a call that is about to be made, such as "runs 'blocks.1'"."""
        self.digest = crc32(call.encode(), self.digest)
        self._made += 1
        self._recent.append(call)
        if call not in self._known:
            self._known.add(call)
            self.tell()

    def recent(self) -> tuple[int, list[str]]:
        """Return how many calls were made before the last ones, and the names of the last ones."""
        return self._made - len(self._recent), [*self._recent]

    def after(self, location: str) -> str:
        """Return the location of a rank with the number and the name of its last call, if it has made any."""
        return f"{location} (call {self._made}: {self._recent[-1]})" if self._recent else location

    def listed(self) -> str:
        """Return the last calls as lines of text."""
        made, names = self.recent()
        numbered = [f"call {made + number}: {name}\n" for number, name in enumerate(names, 1)]
        return "".join(numbered[-_SHOWN:])


def unequal_calls(of_ranks: Sequence[tuple[int, Sequence[str]]]) -> StrategyError:
    """Return an error that names the first call in which the ranks differ.

    Args:
        of_ranks: `CallOrder.recent` of each rank.
    """
    first = max(made for made, _ in of_ranks)
    known = zip_longest(*(names[first - made :] for made, names in of_ranks), fillvalue="makes no other call")
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(next((each for each in known if len(set(each)) > 1), ())):
        ranks.setdefault(call, []).append(str(rank))
    who = [f"rank{'s' * (len(each) > 1)} {', '.join(each)} {call}" for call, each in ranks.items()]
    which = "; ".join(who) or "all ranks differ in an earlier call"
    return StrategyError(f"the ranks run different parts of the model: {which}. {_REMEDY}")
