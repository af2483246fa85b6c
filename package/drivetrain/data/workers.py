"""The worker processes of a dataset, which are asked for batches before anybody wants them."""

from __future__ import annotations

import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from drivetrain.data.copied import Copied
from drivetrain.data.keyed import IndexBatch
from drivetrain.data.worker_ends import WorkerEnded, how_ended, makers
from drivetrain.data.worker_signals import KEPT, Waits, end, end_by_kill, listen, raise_kept, start_server
from drivetrain.data.worker_starts import Marks, kill, lifeless, told
from drivetrain.distributed.signals import held_back
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
        copied: What they get copies of.
        keeps: Whether they stay although that has been changed, because the user has asked for it.
        name: Whose data it is, for warnings.
    """

    def __init__(
        self,
        make: Callable[[Asked, int], DataLoader[Any]],
        index_batches: Callable[[int, int], Iterator[IndexBatch]],
        goes_on: bool,
        failure: Callable[[Exception, IndexBatch | None], DataError],
        copied: Copied,
        keeps: bool,
        name: str,
    ) -> None:
        self._make = make
        self._index_batches = index_batches
        self._goes_on = goes_on
        self._failure = failure
        self._copied = copied
        self._keeps = keeps
        self._name = name
        self._read = False
        self._warned = False
        self._restarted = False
        self._asked = Asked()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._starting: Marks | None = None
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
        if self._iterator is not None or self._loader is not None:
            self._look()
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
                self._loader, self._read = self._make(self._asked, epoch), False
                self._starting = getattr(self._loader.worker_init_fn, "marks", None)
                self._copied.note()
            start_server(self._loader)
            with held_back():
                self._iterator = iter(self._loader)
            end_by_kill(self._iterator)
            listen(self._iterator)
        except Exception as error:
            raise self._failed(error) from error
        except BaseException as error:  # an interrupt
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise
        if not self._loader.persistent_workers:
            self._loader = None

    def _come_to_life(self, epoch: int) -> None:
        """Wait until all workers run; once, start them anew if one of them never will.

        Raises:
            DataError: One of those started anew does not either.
        """
        marks, self._starting = self._starting, None
        if marks is None:
            return
        try:
            stuck = lifeless(self._iterator, marks)
        except BaseException:  # an interrupt, whose traceback may be kept
            self.close()
            raise
        if not stuck:
            self._restarted = False  # the next time it may be as rare again
            return
        what, asked = told(self._iterator, stuck), self._asked
        kill(self._iterator, stuck)
        self._end_workers()
        if self._restarted:
            raise self._failed(WorkerEnded(f"{what}. So it was when they were started before"))
        self._restarted = True
        warnings.warn(f"the {self._name} data: {what}. All its workers are started anew", stacklevel=4)
        self._asked.coming = chain(list(asked.under_way), asked.coming)
        self._start(epoch)
        self._come_to_life(epoch)

    def _look(self) -> None:
        """End workers whose copies are no longer what they are copies of, unless they are to stay."""
        changed = self._copied.changed()
        if changed is None:
            return
        if not self._keeps or not self._read:
            self.close()
            return
        self._warn(
            f"the {self._name} data was changed ({changed}) after its workers were started, which"
            " persistent_workers=True keeps: they do not see it, while those of a resumed run would. Use"
            " persistent_workers=False"
        )

    def _look_amid(self, epoch: int) -> None:
        """Say so where the dataset is changed while an epoch is read, which workers cannot see."""
        changed = None if self._warned else self._copied.changed()
        if changed is not None:
            self._warn(
                f"the {self._name} data was changed ({changed}) while epoch {epoch} was read: its workers"
                " have copies, and do not see it in this epoch, while those of a run that is resumed in it"
                " would. Change it in on_epoch_start, or use num_workers=0"
            )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=2)

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
        ended = how_ended(self._iterator, error)
        self.close()
        return self._failure(WorkerEnded(ended) if ended else error, indices)

    def read(self, epoch: int, position: int) -> Iterator[tuple[Any, IndexBatch]]:
        """What the workers made of each index batch of an epoch from a position on, beside it.

        Raises:
            DataError: A worker or the sampler raised, or another reading has begun meanwhile.
        """
        if self._next is None or self._next[:2] != (epoch, position):
            self.begin(epoch, position, None, Following())
        if self._starting is not None:
            self._come_to_life(epoch)
        reading, under_way = self._reading, self._asked.under_way
        self._next, self._read = None, True
        number = 0
        while True:
            if reading != self._reading:
                raise DataError(
                    f"epoch {epoch} cannot be read on: its workers were given to another pass over the same"
                    " data, or have ended. Pass two loaders to read it twice at a time"
                )
            if under_way and under_way[0].epoch != epoch:
                return
            try:
                assert self._iterator is not None
                if KEPT:
                    raise_kept(self._iterator)
                Waits.iterator = self._iterator
                made = next(self._iterator)
                Waits.iterator = None
            except BaseException as error:
                Waits.iterator = None
                if isinstance(error, StopIteration) and not under_way:
                    self._leave_iterator()
                    return
                if not isinstance(error, Exception):  # an interrupt, whose traceback may be kept
                    self.close()
                    raise
                # A StopIteration before the end is the collate_fn's.
                raise self._failed(error) from error
            indices = under_way.popleft()
            number += 1
            ends = not under_way or under_way[0].epoch != epoch
            if ends or not number & (number - 1):  # the 1st, 2nd, 4th, 8th ...
                self._look_amid(epoch)
            if ends and under_way:
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
        self._iterator = self._loader = self._starting = None
        self._asked = Asked()
        end(getattr(loader, "_iterator", None) if iterator is None else iterator)
