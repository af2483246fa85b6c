"""Data for a loop of your own: batches on the device, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain.data import Feed, as_source, pin_memory_for
from drivetrain.data.alike import check_data
from drivetrain.progress import Progress
from drivetrain.streams import Streams
from drivetrain.types import Batch
from drivetrain.window import OpenWindow

if TYPE_CHECKING:
    from drivetrain.engine import Engine

_STRIDE = 15_485_863
"""Between the streams of a window's micro-batches, which are numbered like those of far later updates."""


class EngineData:
    """Batches on the device, once through per iteration.

    Training data counts into the engine's progress: each iteration is the next epoch, and the first one after
    `Engine.load` goes on where the checkpoint stood, without fetching what was already used.

    Args:
        progress: The engine's.
        feed: The data.
        training: Whether it counts.
        streams: The engine's; each training batch is handed out under a random stream of its own, so that
            what is drawn between two batches, by an evaluation for example, moves nothing.
        window: The engine's; is told which batch was handed out.
    """

    def __init__(
        self, progress: Progress, feed: Feed, training: bool, streams: Streams, window: OpenWindow
    ) -> None:
        self._window = window
        self._progress = progress
        self._feed = feed
        self._training = training
        self._streams = streams

    def __len__(self) -> int:
        """The batches in an epoch.

        Raises:
            TypeError: The data does not know.
        """
        count = self._feed.batches_per_epoch
        if count is None:
            raise TypeError("this data has no known length")
        return count

    def __iter__(self) -> Iterator[Batch]:
        progress = self._progress
        if not self._training:
            # Of data that is only looked at, each sample once, on one of the processes.
            yield from (each.batch for each in self._feed.micro_batches() if not each.stand_in)
            return
        update, number = -1, 0
        for micro_batch in self._feed.micro_batches(progress.epoch, progress.position):
            update, number = progress.updates, number + 1 if progress.updates == update else 0
            # An update's first micro-batch draws what it draws under a Trainer.
            self._streams.seed_update(update + number * _STRIDE)
            progress.position += micro_batch.advance
            progress.micro_batches += 1
            everywhere = micro_batch.everywhere
            progress.samples += micro_batch.samples if everywhere is None else everywhere.samples
            self._window.handed = micro_batch
            yield micro_batch.batch
        self._window.handed = None
        progress.epoch += 1
        progress.position = 0


def engine_data(engine: Engine, data: Any, training: bool, window: OpenWindow) -> EngineData:
    """A user's data for an engine's loop; training data is seen to be the same on all ranks."""
    source = as_source(
        engine.strategy.prepare_data(data),
        "training" if training else "evaluation",
        engine.seed,
        pin_memory=pin_memory_for(engine.device),
        share=engine.share,
        ranks=engine.data_ranks,
    )
    feed = Feed(source, engine.transfer)
    if training:  # what is only looked at may be looked at by one rank alone
        check_data([feed], engine.ranks)
    return EngineData(engine.progress, feed, training, engine.streams, window)
