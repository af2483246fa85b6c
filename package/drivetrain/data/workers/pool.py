"""The worker processes of a dataset, which make batches ahead of their use."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from drivetrain.core.errors import DataError
from drivetrain.data.keyed_batches import IndexBatch
from drivetrain.data.workers.ends import WorkerEnded, how_ended, lacks_shared_memory, makers, note_on
from drivetrain.data.workers.signals import end, expect_deaths, starting


class LookAhead(NamedTuple):
    """The epochs that are read whole after the current one.

    Attributes:
        until: The end of the range of epochs; None if it is unknown.
        limit: The maximum number of batches of each; None for all.
    """

    until: int | None = 0
    limit: int | None = None


class RequestedBatches:
    """The batch sampler that is given to a DataLoader: remembers the batches under way."""

    def __init__(self) -> None:
        self.coming: Iterator[IndexBatch] = iter(())
        self.under_way: deque[IndexBatch] = deque()

    def __iter__(self) -> Iterator[IndexBatch]:
        self.under_way.clear()
        for indices in self.coming:
            self.under_way.append(indices)
            yield indices


class Workers:
    """Workers that make the batches of one epoch after the other.

    A DataLoader keeps a few batches per worker under way. Here they continue into the next epoch while the
    last batches of an epoch are still used, if the caller has said that it follows, so that nobody waits at
    an epoch's start. Only one reading is active; batches of one that was given up are dropped.

    Args:
        make: Makes the DataLoader from a batch sampler and the first epoch.
        index_batches: Returns the index batches of an epoch from a position on.
        goes_on: Whether an epoch's batches may be requested before the previous one has ended.
        failure: Makes the error for an exception and its batch, or None before the first batch.
    """

    def __init__(
        self,
        make: Callable[[RequestedBatches, int], DataLoader[Any]],
        index_batches: Callable[[int, int], Iterator[IndexBatch]],
        goes_on: bool,
        failure: Callable[[Exception, IndexBatch | None], DataError],
    ) -> None:
        self._make = make
        self._index_batches = index_batches
        self._goes_on = goes_on
        self._failure = failure
        self._asked = RequestedBatches()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._next: tuple[int, int, int | None] | None = None
        self._following = LookAhead()
        self._reading = 0

    def begin(self, epoch: int, position: int, limit: int | None, following: LookAhead) -> None:
        """Request the batches that are read next; does nothing if that was done before.

        Args:
            epoch: The epoch that is read next.
            position: Where to begin.
            limit: The maximum number of its batches; None for all.
            following: The epochs that are read after it.
        """
        if self._next == (epoch, position, limit):
            return
        self._reading += 1
        self._following = following if self._goes_on else LookAhead()
        first = self._index_batches(epoch, position)  # draws now, because it may raise, before workers start
        self._asked.coming = self._batches(epoch, islice(first, limit))
        self._leave_iterator()  # its workers end before others start
        self._start(epoch)
        self._next = epoch, position, limit

    def _start(self, epoch: int) -> None:
        try:
            if self._loader is None:
                self._loader = self._make(self._asked, epoch)
            with starting(self._loader):
                self._iterator = iter(self._loader)
            expect_deaths(self._iterator)
        except Exception as error:
            raise self._failed(error) from error
        except BaseException as error:  # an interrupt
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise
        if not self._loader.persistent_workers:
            self._loader = None

    def _leave_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        if self._loader is None:  # otherwise the loader goes on with it
            end(iterator)

    def _batches(self, epoch: int, first: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
        yield from first
        until, limit = self._following
        for following in count(epoch + 1) if until is None else range(epoch + 1, until):
            yield from islice(self._index_batches(following, 0), limit)

    def _failed(self, error: Exception) -> DataError:
        # The traceback would keep alive what torch has made so far.
        traceback.clear_frames(error.__traceback__)
        indices = next(iter(self._asked.under_way), None)
        ended = how_ended(self._iterator, error) or note_on(error)
        advice = lacks_shared_memory(error)  # before the workers, which hold some of it, are ended
        self.close()
        failure = self._failure(WorkerEnded(ended) if ended else error, indices)
        return failure if ended or advice is None else DataError(f"{failure}; {advice}")

    def read(self, epoch: int, position: int) -> Iterator[tuple[Any, IndexBatch]]:
        """Yield the workers' result for each index batch of an epoch from a position on, with that batch.

        Raises:
            DataError: A worker or the sampler raised, or another reading has begun meanwhile.
        """
        if self._next is None or self._next[:2] != (epoch, position):
            self.begin(epoch, position, None, LookAhead())
        reading, under_way = self._reading, self._asked.under_way
        self._next = None
        while True:
            if reading != self._reading:
                raise DataError(
                    f"epoch {epoch} cannot be read on: its workers were given to another pass over the same"
                    " data, or have ended. Pass two loaders to read the data twice at the same time"
                )
            if under_way and under_way[0].epoch != epoch:
                return
            try:
                assert self._iterator is not None
                made = next(self._iterator)
            except BaseException as error:
                if isinstance(error, StopIteration) and not under_way:
                    self._leave_iterator()
                    return
                if not isinstance(error, Exception):  # an interrupt, whose traceback may be kept
                    self.close()
                    raise
                # A StopIteration before the end comes from the collate_fn.
                raise self._failed(error) from error
            indices = under_way.popleft()
            if under_way and under_way[0].epoch != epoch:
                self._next = epoch + 1, 0, self._following.limit
            yield made, indices

    def waiting(self) -> str:
        """Return who makes the next batch, as a phrase; any thread may call it."""
        return makers(self._iterator)

    def close(self) -> None:
        """End the workers; reading again starts new ones."""
        self._reading += 1
        self._next = None
        loader, iterator = self._loader, self._iterator
        self._iterator = self._loader = None
        self._asked = RequestedBatches()
        end(getattr(loader, "_iterator", None) if iterator is None else iterator)
