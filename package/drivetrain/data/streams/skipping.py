"""Streams from which the samples that raise are left out."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain.core.errors import DataError
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import is_out_of_memory
from drivetrain.data.protocols import has_state
from drivetrain.data.skipped_batches import IN_A_ROW, BadSample
from drivetrain.data.streams.samples import SampleStream
from drivetrain.distributed.failure.messages import summary

_LOG = logger(__name__)


def skipping(data: Any, name: str) -> Any:
    """Return an iterable without the samples that raise, or, if it is no loader, without such batches.

    Raises:
        DataError: It is a loader of a kind that may end when a sample has raised.
    """
    if isinstance(data, SampleStream):
        data.dataset, data.goes_on = SkippingStream(data.dataset, data.batch_size), True
        return data
    if not isinstance(data, DataLoader):
        return SkippingStream(data, 1)
    if type(data) is not DataLoader:
        raise DataError(
            f"on_bad_batch='skip' with the {name} data, of type {type(data).__name__}: whether such a loader"
            " goes on after a sample that raised is unknown. Give a torch DataLoader, or the stream itself"
            " with Trainer(batch_size=...)"
        )
    if isinstance(data.dataset, IterableDataset):
        data = copy.copy(data)
        # which a loader does not let one set
        vars(data)["dataset"] = SkippingStream(data.dataset, data.batch_size or 1)
    return data


class SkippingStream(IterableDataset[Any]):
    """A stream without the samples that raise; in all else it is the stream.

    After an error it asks the same iterator for the next sample. A generator, which is at its end, is begun
    again from the stream's own state, if it has one and is read in the main process. The error is raised
    later as a `BadSample`, between two batches, so that no other sample of a batch is lost.

    Args:
        stream: The stream.
        batch_size: The number of samples in a batch.
    """

    def __init__(self, stream: Any, batch_size: int) -> None:
        vars(self).update(stream=stream, samples_of_a_batch=batch_size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "stream":  # which pickle asks for before there is a stream
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stream, name, value)  # by a `worker_init_fn`

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Any]:
        return _SamplesAfter(self.stream, self.samples_of_a_batch)


class _SamplesAfter:
    """The iterator of a `SkippingStream`."""

    def __init__(self, stream: Any, batch_size: int) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._iterator = iter(stream)
        is_generator = isinstance(self._iterator, Generator)
        self._goes_on_by_state = is_generator and get_worker_info() is None and has_state(stream)
        self._given = 0
        self._errors: list[BadSample] = []

    def __iter__(self) -> _SamplesAfter:
        return self

    def __next__(self) -> Any:
        if self._errors and self._given % self._batch_size == 0:
            raise self._errors.pop(0)
        in_a_row: list[Exception] = []
        while True:
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._end(in_a_row)
                raise
            except Exception as error:
                self._note(error, in_a_row)
            else:
                self._given += 1
                return sample

    def _note(self, error: Exception, in_a_row: list[Exception]) -> None:
        """Note that the next sample has raised, and prepare to read the one after it."""
        in_a_row.append(error)
        if is_out_of_memory(error):
            raise error
        if len(in_a_row) == IN_A_ROW:
            raise DataError(
                f"{IN_A_ROW} samples in a row raised, the last one {summary(error)}. If it is the same,"
                " let state_dict() count it before it is made, or leave it out before `shuffled` or `packed`"
            ) from error
        bad = BadSample(f"{summary(error)}, after {self._given} samples in this process")
        if self._goes_on_by_state:
            state = self._stream.state_dict()
            bad = BadSample(f"{bad} (its state: {str(state)[:300]})")
            self._stream.load_state_dict(state)
            self._iterator = iter(self._stream)
        bad.__cause__ = error
        self._errors.append(bad)

    def _end(self, in_a_row: list[Exception]) -> None:
        """Check that the stream has ended, and not only its iterator; raise what waits to be raised."""
        self._iterator = iter(())
        if in_a_row and not self._goes_on_by_state:
            raise DataError(
                f"{summary(in_a_row[-1])}; then the iterator of {type(self._stream).__name__} was at its end,"
                " as a generator is when it has raised, so the samples after it, if there are any, are lost."
                " on_bad_batch='skip' needs an __iter__ that returns an object whose __next__ can be called"
                " again, or a stream with a state that is read without workers. Or make what may fail in the"
                " collate function. Leave bad samples out before `shuffled` and `packed`"
            ) from in_a_row[-1]
        if self._errors and self._given % self._batch_size == 0:
            raise self._errors.pop(0)
        for each in self._errors:  # the last batch is short, and a loader asks for nothing after it
            _LOG.warning(f"a sample of the training data is left out (on_bad_batch='skip'): {each}")
        self._errors = []
