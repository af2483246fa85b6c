"""What torch remembers of meshes of processes."""

from __future__ import annotations

from typing import Any


def forget_meshes() -> None:
    """Have torch forget how operations on shards went before.

    It remembers that by the mesh's shape alone (2.13), with the mesh of then in it. A process that is a copy
    of rank 0, as in a notebook, would take rank 0's part for its own.
    """
    from torch.distributed.tensor import DTensor, _redistribute, debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # torch 2.9
        propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        clear = propagate.cache.cache_clear
    clear()
    for each in vars(_redistribute).values():
        if hasattr(each, "cache_clear") and hasattr(each, "cache_info"):
            each.cache_clear()
