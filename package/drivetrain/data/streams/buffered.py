"""Streams that are made of buffers of another stream's samples, and go on without samples in their state."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from drivetrain.data.protocols import has_state, order_settings, set_epoch
from drivetrain.data.shard import can_be_divided, shards_of


class BufferedStream(IterableDataset[Any]):
    """A stream that reads a buffer of another stream's samples, gives what is made of it, and reads the next.

    If the other stream has a state, the state of this one is that of the other as the buffer began, and the
    number of samples that were given since. A resume reads the buffer again.

    Args:
        data: The other stream.
        buffer: The number of its samples in a buffer.
    """

    def __init__(self, data: Iterable[Any], buffer: int) -> None:
        self._data = data
        self._buffer = buffer
        self._epoch = 0
        self._before: Any = None  # the other stream's state as the buffer began
        # The epoch that is read, the buffer's number, and the samples given of it.
        self._at: list[int] | None = None
        self._from: list[int] | None = None  # where to begin; None for the start of the epoch
        if has_state(data):
            self.state_dict, self.load_state_dict = self._state, self._load
        if can_be_divided(data):
            self.shard, self.num_shards = self._shard, shards_of(data)

    @abstractmethod
    def _made(self, samples: list[Any], epoch: int, number: int) -> Iterable[Any]:
        """Return what is made of a buffer, by the epoch and the buffer's number in it."""

    @abstractmethod
    def _settings(self) -> str:
        """Return what the buffers depend on, and what is made of them."""

    def order_settings(self) -> str:
        """Return what the order depends on beside the other stream's state."""
        return " of ".join(filter(None, (self._settings(), order_settings(self._data))))

    @abstractmethod
    def _of(self, data: Iterable[Any]) -> BufferedStream:
        """Return the same of another stream."""

    def _shard(self, num_shards: int, index: int) -> BufferedStream:
        return self._of(self._data.shard(num_shards, index))  # type: ignore[attr-defined]

    def _state(self) -> dict[str, Any]:
        if self._before is None:
            self._before = copy.deepcopy(self._data.state_dict())  # type: ignore[attr-defined]
        return {"stream": self._before, "at": self._at}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(copy.deepcopy(state["stream"]))  # type: ignore[attr-defined]
        self._before = state["stream"]
        self._at = self._from = state["at"]

    def set_epoch(self, epoch: int) -> None:
        """Tell the other stream which epoch begins."""
        self._epoch = epoch
        set_epoch(self._data, epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, first, skip = self._from or (self._epoch, 0, 0)
        is_resumed, self._from = self._from is not None, None
        samples = (each for each in self._data)
        for number in count(first):
            self._at = [epoch, number, skip]
            if not is_resumed:  # some packages know a loaded state only once they are iterated
                self._before = None
                if has_state(self._data):
                    self._state()
            read = list(islice(samples, self._buffer))
            if not read and is_resumed and not number:  # it was at the end of a pass, and begins anew
                samples = (each for each in self._data)
                read = list(islice(samples, self._buffer))
            is_resumed = False
            if not read:
                self._before = self._at = None
                return
            for given, each in enumerate(islice(self._made(read, epoch, number), skip, None), skip + 1):
                self._at = [epoch, number, given]
                yield each
            skip = 0
