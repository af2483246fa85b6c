"""A backward whose gradients are zero, for a loss that may have no derivative."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


@contextmanager
def zero_gradients(*losses: Tensor, but: Sequence[Tensor] = ()) -> Iterator[None]:
    """Run the block with all gradients of losses zero in backward, even if a loss or a derivative is NaN.

    A weight of zero does not suffice: zero times the infinite derivative of 0 / 0 is NaN. Each node of the
    graph gets zeros instead. This works even if gradients bypass the parameters' hooks, as with FSDP.

    Args:
        but: Losses that keep their gradients, in what they share with the others too.
    """
    handles = zero_nodes([each.grad_fn for each in losses], [each.grad_fn for each in but])
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def zero_nodes(of: Iterable[Node | None], but: Iterable[Node | None]) -> list[Any]:
    """Make the gradients of nodes zero, except where other nodes lead; return the hooks."""
    kept = _graph(but)
    nodes = [each for each in _graph(of) if each not in kept]
    handles: list[Any] = [node.register_prehook(_zeros) for node in nodes]
    if kept:  # from zeros a node may make NaN, for one that is shared
        ends = [node for node in nodes if not _crosses_ranks(node)]
        handles += [node.register_hook(lambda given, _: _zeros(given)) for node in ends]
    return handles


def _graph(starts: Iterable[Node | None]) -> dict[Node, None]:
    """Return the nodes that these lead to, and these themselves."""
    waiting, nodes = list(starts), dict[Node, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            if not _crosses_ranks(node):
                waiting += [following for following, _ in node.next_functions]
    return nodes


def _crosses_ranks(node: Node) -> bool:
    """Return whether what follows has gradients of other ranks, which are not zero."""
    return getattr(node, "crosses_ranks", False)


def _zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
