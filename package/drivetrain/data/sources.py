"""The three kinds of data and how each is read from any position of any epoch.

- indexed: a dataset with a length behind a DataLoader; its order is a function of (seed, epoch), its position
  is the number of samples already used, and resuming fetches nothing that was already used;
- batches: a list or tuple of ready batches;
- iterable: anything else that can be iterated; resumed by its own state when it has one.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from drivetrain.data.bad import LeavesOut
from drivetrain.data.batch import batch_size
from drivetrain.data.outline import outline
from drivetrain.data.rounds import Evidence, SharedBatch, rounds
from drivetrain.data.share import WHOLE, Share
from drivetrain.data.worker_ends import WorkerEnded, how_ended, note_on, raised_in_worker, workers_of
from drivetrain.data.worker_signals import aside, begun, end, sparing
from drivetrain.data.workers import Following
from drivetrain.errors import DataError
from drivetrain.streams import batch_stream, mix_next, seed_after, seed_batch, seed_host
from drivetrain.types import Batch, Stateful

Fetched: TypeAlias = tuple[Batch, int, int | None] | SharedBatch
"""A batch as its source gave it, on the host; how far it moves the position; its number of samples when the
source knows it. Where several processes read the data, a `SharedBatch`."""


class Source(ABC):
    """Data that can be read from a position.

    Attributes:
        name: Whose data it is, for error messages.
        exact: Whether `count` can be relied on; an iterable's own length may be a guess.
        stateful: Whether it is resumed by its own state rather than by the position.
        share: Which part of every round is read here.
        batch_size: Samples of a whole batch of one process, if that is known.
        apart: Whether each process reads data of its own, rather than its part of what all have.
        shows: Whether the next round read is to come with its `Evidence`.
        leaves_out: What is done with a batch that cannot be made, for which `BAD` then stands; None to raise.
    """

    name: str
    exact: bool = True
    stateful: bool = False
    share: Share = WHOLE
    batch_size: int | None = None
    apart: bool = False
    shows: bool = False
    leaves_out: LeavesOut | None = None

    def leave_out_bad(self) -> None:
        """Leave out batches that cannot be made, for which `BAD` then stands.

        Raises:
            DataError: What comes after such a batch cannot be read.
        """

    def waiting(self, epoch: int, number: int) -> str:
        """What makes a batch that is waited for, in a few words; called in any thread."""
        return f"batch {number} of epoch {epoch} of the {self.name} data"

    @abstractmethod
    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """The batches of `epoch` from `position` on.

        Raises:
            DataError: The data raised; names the batch.
        """

    def begin(self, epoch: int, position: int, limit: int | None, following: Following) -> None:
        """Told what is read next, so that batches can be made before they are asked for.

        Args:
            epoch: Which epoch.
            position: From where on.
            limit: At most this many batches of it; None for all.
            following: What is read after it.

        Raises:
            DataError: They cannot be made.
        """

    @property
    def advice(self) -> str:
        """What to do where batches come too slowly."""
        return (
            "Its batches are made in the training process: a dataset with a length, in a DataLoader with"
            " num_workers, has them made ahead"
        )

    def close(self) -> None:
        """End what makes batches ahead; reading again starts it anew."""

    @abstractmethod
    def count(self, position: int = 0) -> int | None:
        """How many batches an epoch has from `position` on; None when that is not known."""

    def number(self, position: int) -> int:
        """Which batch of its epoch begins at a position, for error messages."""
        return position

    def start(self, epoch: int, number: int) -> int:
        """The position at which a batch of an epoch begins."""
        return number

    def description(self) -> dict[str, Any]:
        """What processes that read this together have alike, without reading it: numbers by name."""
        return {"kind": "an iterable"}

    def snapshot(self) -> dict[str, Any] | None:
        """The data's own state, for data that can only be resumed by it."""
        return None

    def gathered(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The state of all processes' data, from that of this one's; they call it together."""
        return state

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take over what `gathered` gave, before `batches` is called with the matching position."""

    def failure(self, error: Exception, number: int, epoch: int, detail: str = "") -> DataError:
        """The error that says which batch could not be had."""
        place = f"batch {number} of epoch {epoch}{detail}"
        if isinstance(error, WorkerEnded):
            return DataError(f"the {self.name} data cannot be read on, with {place} waited for: {error}")
        return DataError(f"the {self.name} data raised at {place}: {type(error).__name__}: {error}")


class BatchSource(Source):
    """Ready batches in a list or tuple; the position counts batches."""

    def __init__(self, name: str, batches: Sequence[Batch], share: Share = WHOLE) -> None:
        self.name = name
        self.share = share
        self._batches = batches

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """The batches from `position` on, in their order."""
        batches = self._batches if position == 0 else itertools.islice(self._batches, position, None)
        if self.share.size > 1:
            return _every_round(batches, self)
        return zip(batches, itertools.repeat(1), itertools.repeat(None))

    def count(self, position: int = 0) -> int | None:
        """What is left of the list."""
        return rounds(max(0, len(self._batches) - position), self.share)

    def description(self) -> dict[str, Any]:
        """How many batches."""
        return {"kind": "a list of batches", "its number of batches": len(self._batches)}


def _every_round(batches: Iterable[Batch], source: Source) -> Iterator[SharedBatch]:
    """One process's batches of data of which every process draws all: nothing is read twice or left out."""
    iterator, (rank, size) = iter(batches), source.share
    while together := list(itertools.islice(iterator, size)):
        stand_in = rank >= len(together)
        counts = [batch_size(each) for each in together]
        everywhere = None if None in counts else sum(counts)  # type: ignore[arg-type]
        evidence = None
        if source.shows:
            source.shows = False
            evidence = Evidence(None, outline((together[0], together[-1])))
        which = 0 if stand_in else rank
        yield SharedBatch(together[which], len(together), counts[which], stand_in, everywhere, evidence)


class IterableSource(Source):
    """Any other iterable; the position counts batches.

    Each batch is drawn under a random stream of (seed, epoch, number), so that augmentation in this process
    is resumed exactly. Batches that were already used are skipped by the iterable's own `state_dict` and
    `load_state_dict` if it has them. Without them the batches are drawn again, and a warning says so.

    Every update calls `state_dict` and copies the result, also when no checkpoint is due. Whether a window is
    the last of its epoch shows only when the next batch is drawn, which moves the state. Whether the window
    is saved is decided after that, by a time, a metric, a signal or a callback. Keep the state small.

    Args:
        name: Whose data it is, for messages.
        data: What is iterated.
        seed: The run's seed.
        share: Which batch of every round is used here; all are drawn.
    """

    def __init__(self, name: str, data: Iterable[Batch], seed: int, share: Share = WHOLE) -> None:
        self.name = name
        self.share = share
        self._data = data
        self._seed = seed
        self.exact = False
        self.stateful = isinstance(data, Stateful)
        self._restored = False
        self._used_up = False
        self._begun: weakref.ref[Any] | None = None
        self._one_shot = iter(data) is data if isinstance(data, Iterator) else False

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """The batches of an epoch."""
        if self.share.size > 1:
            return _every_round((each[0] for each in self._all(epoch, position)), self)
        return self._all(epoch, position)

    def _all(self, epoch: int, position: int) -> Iterator[Fetched]:
        if self._one_shot and self._used_up:
            raise DataError(
                f"the {self.name} data is an iterator and was used up by an earlier epoch; pass something"
                " that can be iterated again (a list, a DataLoader, an object with __iter__), or"
                " max_epochs=1"
            )
        if self.stateful and epoch and not self._restored and not position:
            # As a run does that resumes here, so that both go on from the same state.
            self.restore(self.snapshot())
        number = 0 if not self._restored else position
        # A state taken at the end of an epoch may say "used up", which the next iteration forgets.
        once_more = self._restored and not position
        if position and not self._restored:
            warnings.warn(
                f"the {self.name} data cannot be resumed from its middle: its first {position} batches are"
                " drawn again and dropped. Give it state_dict and load_state_dict, or use a dataset with a"
                " length",
                stacklevel=2,
            )
        self._restored = False
        iterator = self._begin(epoch, number)
        stream = batch_stream(self._seed, epoch)
        while True:
            seed = mix_next(stream, number)
            seed_host(seed)
            try:
                if aside:
                    raise aside.pop()
                batch = next(iterator)
            except StopIteration:
                if once_more:
                    once_more, iterator = False, self._begin(epoch, number)
                    continue
                self._used_up = True
                return
            except Exception as error:
                raise self._failed(error, iterator, number, epoch) from error
            once_more = False
            seed_after(seed)
            number += 1
            if number > position:
                yield batch, 1, None

    @property
    def advice(self) -> str:
        """A DataLoader over an iterable has workers of its own, which we leave alone."""
        workers = getattr(self._data, "num_workers", None)
        if not workers:
            return super().advice
        return (
            f"More than num_workers={workers} may help, persistent_workers=True where epochs are short, and"
            " pin_memory=True on a GPU"
        )

    def _begin(self, epoch: int, number: int) -> Iterator[Batch]:
        for owner in (self._data, getattr(self._data, "dataset", None), getattr(self._data, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        # Loaders with workers draw the workers' seeds here; those must not depend on what ran before.
        seed_batch(self._seed, epoch, -1)
        try:
            with sparing(self._data):
                iterator = iter(self._data)
        except Exception as error:
            # A loader whose workers stay goes on with the iterator that it has.
            stays = getattr(self._data, "_iterator", None)
            raise self._failed(error, stays, number, epoch) from error
        if workers_of(iterator):
            begun(iterator)
            self._begun = weakref.ref(iterator)
        return iterator

    def _failed(self, error: Exception, iterator: Any, number: int, epoch: int) -> DataError:
        """The error for what went wrong as a batch was asked for."""
        ended = how_ended(iterator, error) or note_on(error)
        raised = None if ended else raised_in_worker(iterator, error)
        if raised is not None:
            which, what = raised
            return DataError(f"the {self.name} data raised at batch {number} of epoch {epoch}{which}: {what}")
        return self.failure(WorkerEnded(ended) if ended else error, number, epoch)

    def close(self) -> None:
        """End the workers of a loader."""
        iterator = None if self._begun is None else self._begun()
        self._begun = None
        if iterator is not None and getattr(self._data, "_iterator", None) is iterator:
            self._data._iterator = None  # type: ignore[attr-defined]  # as its workers would stay
        end(iterator)

    def leave_out_bad(self) -> None:
        """Refused: an iterator that has raised is at its end."""
        raise DataError(
            f"on_bad_batch='skip' with the {self.name} data, which is an iterable"
            f" ({type(self._data).__name__}): one that has raised is at its end, so that what comes after a"
            " bad batch cannot be read. Leave out what is bad inside of it, give a dataset with a length, or"
            " use on_bad_batch='raise'"
        )

    def count(self, position: int = 0) -> int | None:
        """Known when the iterable has a length."""
        try:
            return rounds(max(0, len(self._data) - position), self.share)  # type: ignore[arg-type]
        except TypeError:
            return None

    def snapshot(self) -> dict[str, Any] | None:
        """The iterable's own state, when it has one; a copy, as data is drawn from before it is stored."""
        return copy.deepcopy(self._data.state_dict()) if self.stateful else None  # type: ignore[attr-defined]

    def restore(self, state: dict[str, Any] | None) -> None:
        """Hand the iterable its own state back."""
        if isinstance(self._data, Stateful) and state is not None:
            self._data.load_state_dict(copy.deepcopy(state))
            self._restored = True
