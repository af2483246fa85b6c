"""Move batches to the device, one ahead of the step that uses them.

On a CUDA device the copy of the next batch starts on its own stream before the current one is used, so that
it overlaps with the current step. A batch that is made in this process may depend on that step, so it is read
once the step has been given to the device, and its copy overlaps with the rest of the step. One batch ahead
is enough: a step leaves time for one copy, and a data pipeline that is slower than that gains nothing from
more batches on the device. Workers run further ahead, on the host. On the CPU there is nothing to copy and
nothing runs ahead.

A batch of less than 64 KiB is copied on the stream of the steps. That takes the device a few
microseconds, and saves the host more: another stream and its events cost it 0.3 ms on the machine of
docs/explanation/gpu.md.

The micro-batches of a window stay on the host until their turn, so that a window of many takes no more of the
device's memory than a window of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from drivetrain.core.types import Batch
from drivetrain.data.batch import copied_bytes, map_tensors, move
from drivetrain.data.shard import GlobalCounts

_SMALL = 1 << 16
"""Bytes; of less than that the driver takes a copy at once, from memory that is not pinned as well."""


class MicroBatch(NamedTuple):
    """A batch with the numbers that the engine needs.

    Attributes:
        batch: The batch. In a window it is as the data gave it, and `Transfer.moving` moves it.
        weight: Its loss's weight; see `TaskModule.loss_weight`.
        samples: Its number of samples.
        tokens: Its number of tokens, 0 if the task counts none.
        advance: How far it moves the data's position.
        is_placeholder: Whether it is a placeholder: another process's batch, run because this process has no
            samples in the round.
        global_counts: The totals over all processes in the round, if they are known without a collective.
        bad: Whether it could not be made; its batch is None and its weight 0.
        host: The batch as the data gave it, neither moved nor cast, if `Transfer.keeps_host` is set.
    """

    batch: Batch
    weight: float | torch.Tensor
    samples: int = 0
    tokens: int = 0
    advance: int = 1
    is_placeholder: bool = False
    global_counts: GlobalCounts | None = None
    bad: bool = False
    host: Batch = None


class Transfer:
    """Moves batches to one device.

    Args:
        device: The device.
        dtype: The dtype that floating-point tensors are cast to; None leaves them.
        place: Called with each tensor on the device; see `Strategy.place`.

    Attributes:
        keeps_host: Whether a micro-batch that is moved or cast keeps the original batch, so that its parts
            can be counted without rounding and without waiting for the device.
        following: The first micro-batch of the next window, if it was drawn already.
        in_parts: Whether windows are run in parts, so that a whole batch must not be copied ahead.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        place: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._place = place
        self.keeps_host = False
        self.following: MicroBatch | None = None
        self.in_parts = False
        self._ahead: tuple[MicroBatch, MicroBatch, bool] | None = None
        self.idle = device.type == "cpu" and dtype is None
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, ready to use."""
        if self.idle:
            return batch
        moved = move(batch, self.device, self.dtype)
        return moved if self._place is None else map_tensors(self._place, moved)

    def ahead(self, micro_batches: Iterator[MicroBatch], early: bool = True) -> Iterator[MicroBatch]:
        """Return the micro-batches on the device.

        Args:
            micro_batches: On the host.
            early: Whether the next one is drawn, and its copy started, before this one is yielded. False for
                data that is made in this process, or resumed by its own state.
        """
        if self.idle:
            return micro_batches
        if self._stream is None:
            return map(self.moved, micro_batches)
        pairs = zip(micro_batches, repeat(None))
        return map(itemgetter(0), self._moving(pairs, self._stream, None, early))

    @property
    def draws_ahead(self) -> bool:
        """Whether copies overlap with steps, so that it helps to draw the next window's first batch early."""
        return self._stream is not None and not self.in_parts

    def begin(self, micro_batch: MicroBatch) -> None:
        """Start the copy of a window's first micro-batch, unless it was started with the window before."""
        if self._stream is not None and (self._ahead is None or self._ahead[0] is not micro_batch):
            self._ahead = (micro_batch, *self.started(micro_batch, self._stream))

    def forget(self) -> None:
        """Free a copy that was started and is not used."""
        self._ahead = self.following = None

    def moving(self, pairs: Sequence[tuple[MicroBatch, Any]]) -> Iterable[tuple[MicroBatch, Any]]:
        """Return a window's pairs with their micro-batches on the device, each moved when its turn comes.

        On a CUDA device the copy of the next one is started before a pair is yielded.
        """
        if self.idle:
            return pairs
        if self._stream is None:
            return ((self.moved(each), factor) for each, factor in pairs)
        return self._moving(pairs, self._stream, self.following)

    def _moving(
        self,
        pairs: Iterable[tuple[MicroBatch, Any]],
        stream: torch.cuda.Stream,
        then: MicroBatch | None,
        early: bool = True,
    ) -> Iterator[tuple[MicroBatch, Any]]:
        waiting = iter(pairs)
        pair = next(waiting, None)
        while pair is not None:
            micro_batch, factor = pair
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[0] is micro_batch:
                _, moved, beside = ahead
            else:
                moved, beside = self.started(micro_batch, stream)
            if beside:
                self._hand_over(moved.batch, stream)
            if not early:
                yield moved, factor
                pair = next(waiting, None)
                continue
            pair = next(waiting, None)
            following = then if pair is None else pair[0]
            if following is not None:
                self._ahead = (following, *self.started(following, stream))
            yield moved, factor

    def moved(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device, ready to use."""
        host = micro_batch.batch if self.keeps_host else None
        return micro_batch._replace(batch=self(micro_batch.batch), host=host)

    def started(self, micro_batch: MicroBatch, stream: torch.cuda.Stream) -> tuple[MicroBatch, bool]:
        """Return the micro-batch on the device, and whether a stream still copies it."""
        size = copied_bytes(micro_batch.batch)
        if size is None:
            # On the stream of the steps: a tensor that is already on the device may still be computed
            # there, and memory that the user's object allocates may be in use for an unknown time.
            return self.moved(micro_batch), False
        beside = size >= _SMALL
        if beside:
            with torch.cuda.stream(stream):
                pinned = map_tensors(_pinned, micro_batch.batch)
                moved = move(pinned, self.device, self.dtype, non_blocking=True)
        else:
            moved = move(micro_batch.batch, self.device, self.dtype, non_blocking=True)
        return micro_batch._replace(batch=moved, host=micro_batch.batch if self.keeps_host else None), beside

    def _hand_over(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(stream)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            # Allocated on the copying stream but used on the current one: otherwise its memory could be
            # given to the next copy while a kernel still reads it.
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        map_tensors(record, batch)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a large tensor in pinned memory: without workers nobody has pinned it.

    A copy from other memory occupies the host until it is made. torch keeps pinned memory for the next batch.
    """
    # Sparse tensors have no bytes of their own, and an expanded one has its elements several times.
    if tensor.layout is not torch.strided or 0 in tensor.stride() or tensor.nbytes < _SMALL:
        return tensor
    return tensor if tensor.is_pinned() else tensor.pin_memory()
