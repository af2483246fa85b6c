"""The worker processes of a dataset, which are asked for batches before anybody wants them."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from drivetrain.data.keyed import IndexBatch
from drivetrain.data.worker_ends import WorkerEnded, how_ended, makers, note_on
from drivetrain.data.worker_signals import aside, begun, end, starting
from drivetrain.errors import DataError


class Following(NamedTuple):
    """Which epochs are read after one, whole.

    Attributes:
        until: The first that is not; None where nobody knows.
        limit: At most this many batches of each; None for all.
    """

    until: int | None = 0
    limit: int | None = None


class Asked:
    """The batch sampler that is given to a DataLoader: remembers what is under way."""

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

    A DataLoader keeps a few batches for each worker under way. Here these go on into the next epoch while the
    last batches of an epoch are still used, where the caller has said that it follows: nobody waits at the
    border. One reading at a time; what was made for one that was given up is dropped.

    Args:
        make: Makes the DataLoader for a batch sampler and an epoch to begin with.
        index_batches: The index batches of an epoch from a position on.
        goes_on: Whether an epoch's batches may be asked for before the one before it has ended.
        failure: The error for what went wrong, and with which batch; without one before the first.
    """

    def __init__(
        self,
        make: Callable[[Asked, int], DataLoader[Any]],
        index_batches: Callable[[int, int], Iterator[IndexBatch]],
        goes_on: bool,
        failure: Callable[[Exception, IndexBatch | None], DataError],
    ) -> None:
        self._make = make
        self._index_batches = index_batches
        self._goes_on = goes_on
        self._failure = failure
        self._asked = Asked()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._next: tuple[int, int, int | None] | None = None
        self._following = Following()
        self._reading = 0

    def begin(self, epoch: int, position: int, limit: int | None, following: Following) -> None:
        """Ask for the batches that are read next; nothing, if that was done before.

        Args:
            epoch: Which epoch is read next.
            position: From where on.
            limit: At most this many of its batches; None for all.
            following: What is read after it.

        Raises:
            DataError: The sampler raised, or the workers cannot be started.
        """
        if self._next == (epoch, position, limit):
            return
        self._reading += 1
        self._following = following if self._goes_on else Following()
        first = self._index_batches(epoch, position)  # drawn now, before workers are started in vain
        self._asked.coming = self._batches(epoch, islice(first, limit))
        self._leave_iterator()  # whose workers end before others start
        self._start(epoch)
        self._next = epoch, position, limit

    def _start(self, epoch: int) -> None:
        try:
            if self._loader is None:
                self._loader = self._make(self._asked, epoch)
            with starting(self._loader):
                self._iterator = iter(self._loader)
            begun(self._iterator)
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
        if self._loader is None:  # which would go on with it
            end(iterator)

    def _batches(self, epoch: int, first: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
        yield from first
        until, limit = self._following
        for following in count(epoch + 1) if until is None else range(epoch + 1, until):
            yield from islice(self._index_batches(following, 0), limit)

    def _failed(self, error: Exception) -> DataError:
        # The traceback would keep what torch has made so far.
        traceback.clear_frames(error.__traceback__)
        indices = next(iter(self._asked.under_way), None)
        ended = how_ended(self._iterator, error) or note_on(error)
        self.close()
        return self._failure(WorkerEnded(ended) if ended else error, indices)

    def read(self, epoch: int, position: int) -> Iterator[tuple[Any, IndexBatch]]:
        """What the workers made of each index batch of an epoch from a position on, beside it.

        Raises:
            DataError: A worker or the sampler raised, or another reading has begun meanwhile.
        """
        if self._next is None or self._next[:2] != (epoch, position):
            self.begin(epoch, position, None, Following())
        reading, under_way = self._reading, self._asked.under_way
        self._next = None
        while True:
            if reading != self._reading:
                raise DataError(
                    f"epoch {epoch} cannot be read on: its workers were given to another pass over the same"
                    " data, or have ended. Pass two loaders to read it twice at a time"
                )
            if under_way and under_way[0].epoch != epoch:
                return
            try:
                if aside:
                    raise aside.pop()
                assert self._iterator is not None
                made = next(self._iterator)
            except BaseException as error:
                if isinstance(error, StopIteration) and not under_way:
                    self._leave_iterator()
                    return
                if not isinstance(error, Exception):  # an interrupt, whose traceback may be kept
                    self.close()
                    raise
                # A StopIteration before the end is the collate_fn's.
                raise self._failed(error) from error
            indices = under_way.popleft()
            if under_way and under_way[0].epoch != epoch:
                self._next = epoch + 1, 0, self._following.limit
            yield made, indices

    def waiting(self) -> str:
        """Who makes the batch that is given next, in a few words; called in any thread."""
        return makers(self._iterator)

    def close(self) -> None:
        """End the workers; reading again starts others."""
        self._reading += 1
        self._next = None
        self._end_workers()

    def _end_workers(self) -> None:
        loader, iterator = self._loader, self._iterator
        self._iterator = self._loader = None
        self._asked = Asked()
        end(getattr(loader, "_iterator", None) if iterator is None else iterator)
