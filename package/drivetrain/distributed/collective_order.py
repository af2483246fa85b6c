"""Checks that all ranks make the same collective calls in the same order, at no cost while they do.

Collectives match by their order alone. If ranks run different parts of a model, one rank's weights or
gradients are taken for those of another part, or the ranks wait for each other for ever.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TICK = 1.0
"""Seconds between two looks at how far ranks are."""

_RARE_TICK = 30.0
"""Seconds between those of a rank that waits together with another, which looks more often."""

_KEPT = 256
"""Calls of the recent past that a rank can still report."""

_LEARNT = 100_000
"""Calls whose followers are remembered."""


class CollectiveOrder:
    """A check of the order of a strategy's collective calls; `next` is called before each.

    A call that followed the same call before is made at once. Any other is compared with the other ranks'
    first, through torch's store. So a step that repeats the last one sends nothing, and one that leaves out
    a block on all ranks costs one comparison. If only some ranks make another call, the others are in a
    collective already and cannot answer. A thread of each rank therefore publishes how far the rank is
    when it stands still and another rank asks. A store in a file keeps all that was ever written to it.

    torch's own comparison (TORCH_DISTRIBUTED_DEBUG=DETAIL) takes a further collective before each one, and
    compares kinds and shapes, which two equal blocks share.

    Args:
        ranks: All ranks of the job; all make one at the same time.

    Attributes:
        comparisons: How many calls were compared so far.
    """

    def __init__(self, ranks: Ranks, problem: str, remedy: str) -> None:
        self._rank, self._size = ranks.rank * ranks.copies + ranks.copy, ranks.size * ranks.copies
        self._problem, self._remedy = problem, remedy
        self._window: Any = None
        self._last = ""
        self._seen: dict[str, int] = {}  # how often each call was made in this window
        self._following: dict[tuple[Any, str, int], str] = {}
        self._made = self.comparisons = 0
        self._compared = -1
        self._recent: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._closed = threading.Event()
        if self._size == 1:
            self._closed.set()
            return
        self._store = store = torch.distributed.distributed_c10d._get_default_store()
        # How many of these this rank has made on this store: the same number on every rank.
        number = store.add(f"drivetrain/order/{self._rank}", 1)
        self._key = f"drivetrain/order/{number}"
        store.add(f"{self._key}/asked", 1)
        self._publish(store)
        store.set(f"{self._key}/wants/{self._rank}", json.dumps([-1, ""]))
        self._thread = threading.Thread(target=self._watch, name="drivetrain-order", daemon=True)
        self._thread.start()

    def begin(self, window: Any) -> None:
        """Note that the calls of a forward or backward begin.

        Args:
            window: Its kind, such as "forward". The same call may be followed by others in each kind.
        """
        self._window = window
        self._seen.clear()

    def next(self, call: str) -> None:
        """Check that the other ranks make this call too, before it is made."""
        if self._closed.is_set():
            return
        seen = self._seen
        key = (self._window, self._last, seen.get(self._last, 0))
        if self._following.get(key) != call:
            self._compare(call)
            if len(self._following) >= _LEARNT:
                self._following.clear()
            self._following[key] = call
        self._recent.append((self._made, call))
        self._made += 1
        self._last = call
        seen[call] = seen.get(call, 0) + 1

    def close(self) -> None:
        """End the check; every call is then made unseen."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()

    def _compare(self, call: str) -> None:
        """Wait until all ranks are at this place, and compare their calls."""
        self.comparisons += 1
        store, here = self._store, f"{self._key}/{self._made}"
        store.set(f"{self._key}/wants/{self._rank}", json.dumps([self._made, call]))
        arrived = store.add(f"{here}/arrived", 1)
        if arrived == self._size:
            same = all(each == [self._made, call] for each in self._of_all("wants"))
            if self._compared >= 0:  # all have left the last comparison
                for name in ("arrived", "same"):
                    store.delete_key(f"{self._key}/{self._compared}/{name}")
            store.set(f"{here}/same", "yes" if same else "no")
        # The first one looks after the others, so that thousands of waiting ranks do not burden the store.
        pause, tick = 1e-4, _TICK if arrived == 1 else _RARE_TICK
        following, has_asked = time.monotonic() + tick, False
        while not store.check([f"{here}/same"]):
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)
            if time.monotonic() >= following:
                following += tick
                if has_asked and self._have_gone_on(call):
                    break
                store.add(f"{self._key}/asked", 1)
                has_asked = True
        else:
            if store.get(f"{here}/same") != b"yes":
                raise self._error([text for _, text in self._of_all("wants")])
        self._compared = self._made

    def _have_gone_on(self, call: str) -> bool:
        """Return whether all others have made this call without a comparison, or wait at this place for it.

        They have learnt another order only if their windows were of other kinds.
        """
        found = [text if made == self._made else "" for made, text in self._of_all("wants")]
        for rank, made in enumerate(self._of_all("at")):
            if rank != self._rank and made > self._made:
                recent = dict(json.loads(self._store.get(f"{self._key}/recent/{rank}")))
                found[rank] = recent.get(self._made, "has gone on")
        if any(each not in ("", call) for each in found):
            raise self._error(found)
        return "" not in found

    def _of_all(self, name: str) -> list[Any]:
        """Return what the ranks have stored last under a name, by rank."""
        keys = [f"{self._key}/{name}/{rank}" for rank in range(self._size)]
        return [json.loads(each) for each in self._store.multi_get(keys)]

    def _error(self, found: Sequence[str]) -> StrategyError:
        holders: dict[str, list[int]] = {}
        for rank, text in enumerate(found):
            holders.setdefault(text, []).append(rank)
        who = {text: f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for text, of in holders.items()}
        listed = "; ".join(f"{who[text]} {text}" for text in holders if text)
        late = f"; {who['']} had not come so far" if "" in who else ""
        return StrategyError(f"{self._problem}: {listed}{late}. {self._remedy}")

    def _publish(self, store: Store) -> None:
        made = self._made
        store.set(f"{self._key}/recent/{self._rank}", json.dumps(list(self._recent)))
        store.set(f"{self._key}/at/{self._rank}", json.dumps(made))

    def _watch(self) -> None:
        last, published = 0, (0, b"")
        while not self._closed.wait(_TICK):
            made = self._made
            if made == last and made != published[0]:
                try:
                    now = (made, self._store.get(f"{self._key}/asked"))
                    if now[1] != published[1]:
                        self._publish(self._store)
                        published = now
                except RuntimeError:  # the store has ended with rank 0, which the failure channel reports
                    return
            last = made
