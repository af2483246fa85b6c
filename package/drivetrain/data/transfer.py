"""Bringing batches to the device, one ahead of the step that uses them.

On a CUDA device the copy of the next batch is started on a stream of its own before the current one is handed
out, so that it runs beside the current step. One ahead is enough: while a step is computed there is time for
one copy, and a data pipeline that is slower than that gains nothing by more of them on the device. What runs
further ahead are the workers, on the host. On the CPU there is nothing to copy and nothing runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from drivetrain.data.batch import host_tensors_only, map_tensors, move
from drivetrain.data.share import Everywhere
from drivetrain.types import Batch


class MicroBatch(NamedTuple):
    """A batch with what the engine needs to know of it.

    Attributes:
        batch: The batch, on the device once it comes out of a feed.
        weight: What its loss is a mean over; see `TaskModule.loss_weight`.
        samples: Its number of samples.
        tokens: Its number of tokens, 0 when the task counts none.
        advance: How far it moves the data's position.
        stand_in: Whether it is another process's, because this one has no samples in the round.
        everywhere: What all processes have in the round, where that is known without asking them.
        bad: Whether it could not be made, and weighs nothing; its batch is None.
        host: The batch as the data gave it, neither moved nor cast, where `Transfer.keeps_host` asks for it.
    """

    batch: Batch
    weight: float | torch.Tensor
    samples: int = 0
    tokens: int = 0
    advance: int = 1
    stand_in: bool = False
    everywhere: Everywhere | None = None
    bad: bool = False
    host: Batch = None


class Transfer:
    """Moves batches to one device.

    Args:
        device: Where to.
        dtype: What floating-point tensors are cast to; None leaves them.
        place: What is done with each tensor there; see `Strategy.place`.

    Attributes:
        keeps_host: Whether a micro-batch that is moved or cast keeps the batch as it was: what is counted of
            its parts must not be rounded, nor waited for.
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
        self.idle = device.type == "cpu" and dtype is None
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Batch:
        """The batch on the device, ready to use."""
        if self.idle:
            return batch
        moved = move(batch, self.device, self.dtype)
        return moved if self._place is None else map_tensors(self._place, moved)

    def ahead(self, micro_batches: Iterator[MicroBatch], early: bool = True) -> Iterator[MicroBatch]:
        """The micro-batches on the device.

        Args:
            micro_batches: On the host.
            early: Whether the next one may be drawn, and its copy started, before this one is handed out.
                Data that is resumed by its own state must not be drawn from early.
        """
        if self.idle:
            return micro_batches
        if self._stream is None or not early:
            return (self._with(each, self(each.batch)) for each in micro_batches)
        return self._on_own_stream(micro_batches, self._stream)

    def _with(self, micro_batch: MicroBatch, moved: Batch) -> MicroBatch:
        return micro_batch._replace(batch=moved, host=micro_batch.batch if self.keeps_host else None)

    def _on_own_stream(
        self, micro_batches: Iterator[MicroBatch], stream: torch.cuda.Stream
    ) -> Iterator[MicroBatch]:
        ready: MicroBatch | None = None
        for micro_batch in micro_batches:
            beside = host_tensors_only(micro_batch.batch)
            if beside:
                with torch.cuda.stream(stream):
                    moved = move(micro_batch.batch, self.device, self.dtype, non_blocking=True)
            else:
                # In the stream of the steps: what is on the device already may still be computed there, and
                # what an object of the user's own allocates may be in use for nobody knows how long.
                moved = move(micro_batch.batch, self.device, self.dtype)
            if ready is not None:
                yield ready
            if beside:
                self._hand_over(moved, stream)
            ready = self._with(micro_batch, moved)
        if ready is not None:
            yield ready

    def _hand_over(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(stream)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            # Allocated on the copying stream but used on the current one: without this its memory could be
            # given to the next copy while a kernel still reads it.
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        map_tensors(record, batch)
