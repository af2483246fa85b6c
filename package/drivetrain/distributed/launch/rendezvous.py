"""Wait for all ranks before a run begins: torch waits silently for one that never comes."""

from __future__ import annotations

import contextlib
import math

from torch import distributed
from torch._C._distributed_c10d import Store

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.core.messages import logger
from drivetrain.distributed.launch.children import ending, started
from drivetrain.distributed.launch.meeting import Patience
from drivetrain.distributed.processes import is_grouped

_LOG = logger(__name__)

_COME = "drivetrain/come/{}"
"""A key in the store: the number of runs that a rank has reached."""

_GATHERED = "drivetrain/gathered/{}"
"""A key in the store: the number of ranks that have reached a run; with "/all", set when all have."""

_ENDED = "drivetrain/ended"
"""A key in the store: a rank whose program has ended."""


_ON_ALL = (
    "Call fit, validate, test and predict on all ranks, not under `if rank == 0:`; each sample is counted"
    " once, and every rank gets the result"
)


def gather(rank: int, world_size: int) -> None:
    """Wait until all ranks have called this as often as this one, however long that takes.

    A warning names a rank that is missing after ten seconds, and then each minute: it may still be busy
    elsewhere.
    """
    store = default_store()
    patience = Patience(_LOG.warning, math.inf)
    try:
        run = store.add(_COME.format(rank), 1)
        gathered = _GATHERED.format(run)
        if store.add(gathered, 1) == world_size:
            store.set(f"{gathered}/all", "")
        while not store.check([f"{gathered}/all"]):
            _check_others(store)
            missing: int | None = None
            if patience.is_due():
                missing = next(
                    (each for each in range(world_size) if store.add(_COME.format(each), 0) < run), rank
                )
            patience.wait(f"rank {missing} to begin the same run", f" {_ON_ALL}")
    except distributed.DistError as error:  # the store lives in rank 0's process
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
    """Note in the store that this process ends, for ranks that would wait for it."""
    if distributed.is_initialized():
        with contextlib.suppress(distributed.DistError):  # rank 0 has ended, and no rank waits any more
            default_store().set(_ENDED, str(distributed.get_rank()))


def default_store() -> Store:
    """Return the store of torch's default process group."""
    if not is_grouped():
        raise StrategyError("this needs a process group, whose store the ranks share, and there is none")
    store: Store = distributed.distributed_c10d._get_default_store()
    return store
