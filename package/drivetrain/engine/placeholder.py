"""Placeholder batches: a rank that has nothing to learn from runs one without side effects.

All ranks then make the same collective calls, whatever the strategy exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from drivetrain.data import MicroBatch, to_host
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.buffers import KeptBuffers
from drivetrain.engine.metrics.means import Row
from drivetrain.strategies import Strategy
from drivetrain.strategies.zero_gradients import zero_gradients
from drivetrain.task.output import no_loss, read_output


def has_zero_weight(micro_batch: MicroBatch) -> bool:
    """Return whether there is nothing to learn from; a weight on an accelerator is not read."""
    return not isinstance(micro_batch.weight, Tensor) and not micro_batch.weight


class Placeholders:
    """Runs micro-batches of weight zero as placeholders, without side effects.

    A placeholder is the micro-batch itself, whose loss may be 0 / 0. Only a micro-batch that could not be
    made has no batch: it gets the last batch of this rank, or another rank's if there is none yet.

    Attributes:
        bad: The number of micro-batches of the last window that could not be made, on all ranks.
    """

    def __init__(self) -> None:
        self.bad = 0
        self._last: MicroBatch | None = None
        self._buffers = KeptBuffers()

    def lacking(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether a micro-batch could not be made and this rank has no batch for it."""
        return self._last is None and all(each.bad for each in micro_batches)

    def borrow(self, micro_batches: Sequence[MicroBatch], ranks: Ranks) -> None:
        """Take another rank's batch if this rank lacks one. All ranks must call it if any rank lacks one."""
        mine = next((each for each in micro_batches if not each.bad), None)
        host = None if mine is None else to_host(mine.batch)
        batches = [each for each in ranks.all_gather(host) if each is not None]
        if self.lacking(micro_batches):
            self._last = MicroBatch(batches[0], 1.0)

    def put_in(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, with those of weight zero marked as placeholders and given a batch."""
        for each in micro_batches:
            if not each.bad:
                self._last = each
        return [self._placeholder(each) if has_zero_weight(each) else each for each in micro_batches]

    def _placeholder(self, micro_batch: MicroBatch) -> MicroBatch:
        last = self._last if micro_batch.bad and self._last is not None else micro_batch
        return micro_batch._replace(batch=last.batch, is_placeholder=True)

    def drop(self) -> None:
        """Forget the last batch: its step was skipped, perhaps because the batch holds a NaN."""
        self._last = None

    def run(
        self,
        task: nn.Module,
        strategy: Strategy,
        run_step: Callable[[Any], Any],
        micro_batch: MicroBatch,
        factor: float | Tensor | None,
    ) -> Row:
        """Run forward and backward of a placeholder; return its scalars."""
        read = read_output(self.forward(task, run_step, micro_batch.batch))
        loss, names, values, _, _, terms = read
        if loss is None or values is None or terms is not None or not loss.requires_grad:
            raise no_loss(task, read)
        self.backward(task, strategy, loss, factor)
        return names, values, micro_batch.weight

    def forward(self, task: nn.Module, run_step: Callable[[Any], Any], given: Any) -> Any:
        """Run a placeholder's forward, or a generator step to its next yield; restore the buffers."""
        with self._buffers_unchanged(task):
            return run_step(given)

    def backward(
        self,
        task: nn.Module,
        strategy: Strategy,
        loss: Tensor,
        factor: float | Tensor | None,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Run a placeholder's backward: it adds zero to every gradient; see `Strategy.backward`."""
        with self._buffers_unchanged(task), zero_gradients(loss):
            strategy.backward(loss, factor, inputs)

    @contextmanager
    def _buffers_unchanged(self, task: nn.Module) -> Iterator[None]:
        # SyncBatchNorm averages statistics over all ranks, which would differ afterwards.
        self._buffers.keep(task, but=nn.SyncBatchNorm)
        try:
            yield
        finally:
            self._buffers.put_back(hide_from_autograd=True)  # a placeholder's graph has no effect
