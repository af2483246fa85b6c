"""A shuffle buffer that resumes from positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.core.errors import DataError
from drivetrain.core.random_streams import ORDER, mix
from drivetrain.core.validation import count
from drivetrain.data.streams.buffered import BufferedStream


def shuffled(data: Iterable[Any], buffer: int, *, seed: int = 0) -> ShuffledStream:
    """Shuffle a stream, a buffer at a time.

    The order within each buffer follows from the seed, the epoch and the buffer's number. If the stream has
    `state_dict` and `load_state_dict`, so has the result, and a resume is exact. The state holds no samples:
    it is the stream's own as the buffer began, and a position in the buffer, which a resume reads again. A
    stream that can be divided by `shard` can still be divided.

    Args:
        data: A stream of samples.
        buffer: The number of samples that are held and shuffled together. Streams are often shuffled by
            shards too, because no sample leaves its buffer.
        seed: What the order depends on.

    Raises:
        ConfigError: An argument is out of range.
        DataError: The data has a length and an index, or gives batches.
    """
    is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if is_indexed or isinstance(data, DataLoader) or not hasattr(data, "__iter__"):
        raise DataError(
            f"shuffled() takes a stream of samples, not a {type(data).__name__}. A dataset with a length is"
            " shuffled whole by Trainer(batch_size=...) or DataLoader(shuffle=True); of a loader, give the"
            " loader's dataset"
        )
    return ShuffledStream(data, count("buffer", buffer, at_least=2), count("seed", seed))


class ShuffledStream(BufferedStream):
    """A stream in another order; see `shuffled`."""

    def __init__(self, data: Iterable[Any], buffer: int, seed: int) -> None:
        super().__init__(data, buffer)
        self._seed = seed
        if hasattr(data, "collate_fn"):
            self.collate_fn = data.collate_fn

    def _of(self, data: Iterable[Any]) -> ShuffledStream:
        return ShuffledStream(data, self._buffer, self._seed)

    def _settings(self) -> str:
        return f"shuffled(buffer={self._buffer}, seed={self._seed})"

    def _made(self, samples: list[Any], epoch: int, number: int) -> Iterable[Any]:
        generator = torch.Generator().manual_seed(mix(ORDER, self._seed, epoch, number))
        return map(samples.__getitem__, torch.randperm(len(samples), generator=generator).tolist())
