"""Placeholder batches: a rank that has nothing to learn from runs one, and nothing of it stays.

All ranks go through the same collectives that way, whatever the strategy exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.data import MicroBatch, Transfer, to_host
from drivetrain.distributed.ranks import Ranks
from drivetrain.kept_buffers import KeptBuffers
from drivetrain.strategies import Strategy


def weighs_nothing(micro_batch: MicroBatch) -> bool:
    """Whether there is nothing to learn from; a weight on an accelerator is not looked at."""
    return not isinstance(micro_batch.weight, Tensor) and not micro_batch.weight


class Placeholders:
    """Puts placeholders in place of micro-batches of weight zero, and runs them without side effects.

    A placeholder is the micro-batch itself, whose loss may well be 0 / 0. Only one that could not be made has
    no batch: it gets the last one that this rank has run, or another rank's if there is none yet.

    Args:
        transfer: Brings a batch to the device.

    Attributes:
        bad: How many micro-batches of the last window could not be made, in all processes.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.bad = 0
        self._transfer = transfer
        self._last: MicroBatch | None = None
        self._buffers = KeptBuffers()

    def lacking(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether no batch is here to run for one that could not be made."""
        return self._last is None and all(each.bad for each in micro_batches)

    def borrow(self, micro_batches: Sequence[MicroBatch], ranks: Ranks) -> None:
        """Take another rank's batch where there is none. Called by all ranks, when one of them is lacking."""
        mine = next((each for each in micro_batches if not each.bad), None)
        host = None if mine is None else to_host(mine.batch if mine.host is None else mine.host)
        batches = [each for each in ranks.all_gather(host) if each is not None]
        if self.lacking(micro_batches):
            self._last = MicroBatch(self._transfer(batches[0]), 1.0, host=batches[0])

    def put_in(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, with those of weight zero marked as placeholders and given a batch."""
        for each in micro_batches:
            if not each.bad:
                self._last = each
        return [self._placeholder(each) if weighs_nothing(each) else each for each in micro_batches]

    def _placeholder(self, micro_batch: MicroBatch) -> MicroBatch:
        last = self._last if micro_batch.bad and self._last is not None else micro_batch
        return micro_batch._replace(batch=last.batch, host=last.host, stand_in=True)

    def drop(self) -> None:
        """Forget the last batch: its update was skipped, perhaps because the batch holds a NaN."""
        self._last = None

    def forward(self, task: nn.Module, run_step: Callable[[Any], Any], given: Any) -> Any:
        """Run a placeholder's forward, or a generator step to its next yield; buffers stay as they were."""
        with self._buffers_unchanged(task):
            return run_step(given)

    def backward(
        self,
        task: nn.Module,
        strategy: Strategy,
        loss: Tensor,
        share: float | Tensor | None,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Run a placeholder's backward: every gradient that it adds is zero; see `Strategy.backward`."""
        with self._buffers_unchanged(task), zero_gradients(loss):
            strategy.backward(loss, share, inputs)

    @contextmanager
    def _buffers_unchanged(self, task: nn.Module) -> Iterator[None]:
        # The statistics of SyncBatchNorm are those of all ranks, which would differ afterwards.
        self._buffers.keep(task, but=nn.SyncBatchNorm)
        try:
            yield
        finally:
            self._buffers.put_back(unseen=True)  # nothing counts of a placeholder's graph


@contextmanager
def zero_gradients(loss: Tensor) -> Iterator[None]:
    """Make every gradient of a loss zero in a backward, also where the loss or a derivative is NaN.

    A share of zero would not do: zero times the infinite derivative of 0 / 0 is NaN. Each node of the graph
    is given zeros instead, also where gradients bypass the parameters' own hooks, as those of FSDP do.
    """
    waiting, nodes = [loss.grad_fn], dict[torch.autograd.graph.Node, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += [following for following, _ in node.next_functions]
    handles = [node.register_prehook(_zeros) for node in nodes]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
