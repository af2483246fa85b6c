"""All ranks come to the same run before it begins: torch waits in silence for one that never comes."""

from __future__ import annotations

import contextlib
import time
import warnings

from torch import distributed
from torch._C._distributed_c10d import Store

from drivetrain.distributed.children import ending, started
from drivetrain.errors import RankFailure

_COME = "drivetrain/come/{}"
"""In the store: to how many runs a rank has come."""

_GATHERED = "drivetrain/gathered/{}"
"""In the store: how many ranks have come to the run of this number, and with "/all" that all have."""

_ENDED = "drivetrain/ended"
"""In the store: a rank whose program has come to its end."""

_PAUSES = (0.001, 0.2)
"""Seconds between two looks at the store: at first, and at last."""

_LATE = 10.0
"""Seconds after which a rank that has not come is named."""

_ON_ALL = (
    "Call fit, validate, test and predict on all ranks, not under `if rank == 0:`; each sample is counted"
    " once, and every rank gets the result"
)


def gather(rank: int, world_size: int) -> None:
    """Wait until all ranks have called this as often as this one, however long that takes.

    A rank that is missing after ten seconds is named in a warning: it may still be at work elsewhere.

    Args:
        rank: This process.
        world_size: How many there are.

    Raises:
        RankFailure: A rank has ended instead.
    """
    store = _store()
    begun, pause, is_told = time.monotonic(), _PAUSES[0], False
    try:
        run = store.add(_COME.format(rank), 1)
        gathered = _GATHERED.format(run)
        if store.add(gathered, 1) == world_size:
            store.set(f"{gathered}/all", "")
        while not store.check([f"{gathered}/all"]):
            _check_others(store)
            if time.monotonic() - begun > _LATE and not is_told:
                is_told = True
                others = range(world_size)
                missing = next((each for each in others if store.add(_COME.format(each), 0) < run), rank)
                warnings.warn(
                    f"rank {rank} has waited {_LATE:g} s for rank {missing} to begin the same run. {_ON_ALL}",
                    stacklevel=2,
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
    except distributed.DistError as error:  # the store is in rank 0's process
        raise _gone("rank 0 has ended") from error


def _check_others(store: Store) -> None:
    if store.check([_ENDED]):
        raise _gone(f"rank {store.get(_ENDED).decode()} has ended")
    for each in started.values():
        code = each.poll()
        if code is not None:
            raise _gone(f"rank {each.rank} {ending(code)}")


def _gone(what: str) -> RankFailure:
    return RankFailure(f"{what}, and this run needs all ranks. {_ON_ALL}")


def note_end() -> None:
    """Leave word of this process's end for those who would wait for it."""
    if distributed.is_initialized():
        with contextlib.suppress(distributed.DistError):  # rank 0 has ended, and nobody waits any more
            _store().set(_ENDED, str(distributed.get_rank()))


def _store() -> Store:
    store: Store = distributed.distributed_c10d._get_default_store()
    return store
