"""The three kinds of data, all readable from any position of any epoch.

- indexed: a dataset with a length behind a DataLoader; its order is a function of (seed, epoch), its position
  is the number of samples already used, and resuming fetches none of them again;
- batches: a list or tuple of ready batches;
- iterable: any other iterable; resumed by its own state if it has one.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from drivetrain.core.errors import DataError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import batch_stream, mix_next, seed_after, seed_batch, seed_host
from drivetrain.core.types import Batch, Stateful
from drivetrain.data.batch import batch_size
from drivetrain.data.fingerprint import fingerprint
from drivetrain.data.rank_rounds import Evidence, SharedBatch, rounds
from drivetrain.data.shard import WHOLE, Share
from drivetrain.data.skipped_batches import BadBatchSkipper
from drivetrain.data.window_plan import WindowPlan
from drivetrain.data.workers.ends import WorkerEnded, how_ended, note_on, raised_in_worker, workers_of
from drivetrain.data.workers.pool import LookAhead
from drivetrain.data.workers.signals import aside, end, watch_workers, workers_ignoring_signals

_LOG = logger(__name__)

Fetched: TypeAlias = tuple[Batch, int, int | None] | SharedBatch
"""A batch as its source gave it, on the host; how far it moves the position; and its number of samples if the
source knows it. If several processes read the data, a `SharedBatch`."""


class Source(ABC):
    """Data that can be read from a position.

    Attributes:
        name: The data's name, for error messages.
        exact: Whether `count` is exact; an iterable's own length may be a guess.
        stateful: Whether it is resumed by its own state rather than by the position.
        one_shot: Whether it is an iterator, which can be read once.
        share: The shard of every round that is read here.
        batch_size: The number of samples of a whole batch of one process, if known.
        samples_per_epoch: The number of samples of an epoch, if positions count them and every batch is of
            `batch_size`.
        is_split: Whether each process reads data of its own, rather than its part of common data.
        needs_evidence: Whether the next round must come with its `Evidence`.
        skipper: Replaces a batch that cannot be made by `BAD`; None raises.
        dataset: The user's dataset, if there is one.
    """

    name: str
    exact: bool = True
    stateful: bool = False
    one_shot: bool = False
    share: Share = WHOLE
    batch_size: int | None = None
    samples_per_epoch: int | None = None
    is_split: bool = False
    needs_evidence: bool = False
    skipper: BadBatchSkipper | None = None
    dataset: Any = None

    def skip_bad_batches(self) -> None:
        """Leave out batches that cannot be made, and give `BAD` for each.

        Raises:
            DataError: The data cannot be read on after such a batch.
        """

    def follow(self, plan: WindowPlan) -> None:
        """Make batches of the sizes of a plan; only for a source with `samples_per_epoch`."""
        raise NotImplementedError

    def waiting(self, epoch: int, number: int) -> str:
        """Describe a batch that is waited for, and who makes it; any thread may call this."""
        return f"batch {number} of epoch {epoch} of the {self.name} data"

    @abstractmethod
    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Yield the batches of `epoch` from `position` on.

        Raises:
            DataError: The data raised; names the batch.
        """

    def begin(self, epoch: int, position: int, limit: int | None, following: LookAhead) -> None:
        """Prepare what is read next, so that batches can be made before they are asked for.

        Args:
            epoch: The epoch.
            position: Where to begin.
            limit: The maximum number of its batches; None for all.
            following: The epochs that are read after it.

        Raises:
            DataError: The batches cannot be made.
        """

    @property
    def advice(self) -> str:
        """A hint for when batches come too slowly."""
        return (
            "Its batches are made in the training process: a dataset with a length, in a DataLoader with"
            " num_workers, has them made ahead"
        )

    def close(self) -> None:
        """End what makes batches ahead; reading again starts it anew."""

    @abstractmethod
    def count(self, position: int = 0) -> int | None:
        """Return the number of batches of an epoch from `position` on; None if unknown."""

    def number(self, position: int) -> int:
        """Return the number in its epoch of the batch at a position, for error messages."""
        return position

    def start(self, epoch: int, number: int) -> int:
        """Return the position at which a batch of an epoch begins."""
        return number

    def description(self) -> dict[str, Any]:
        """Return properties, by name, that must be equal in processes that read this together."""
        return {"kind": "an iterable"}

    def snapshot(self) -> dict[str, Any] | None:
        """Return the data's own state; None for data that is resumed by its position."""
        return None

    def gathered(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Gather the state of all processes' data from this one's; all processes call it."""
        return state

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the result of `gathered`, before `batches` is called with the matching position."""

    def failure(self, error: Exception, number: int, epoch: int, detail: str = "") -> DataError:
        """Return an error that names the batch that could not be made."""
        place = f"batch {number} of epoch {epoch}{detail}"
        if isinstance(error, WorkerEnded):
            return DataError(f"the {self.name} data cannot be read on; {place} was waited for: {error}")
        return DataError(f"the {self.name} data raised at {place}: {type(error).__name__}: {error}")


class BatchSource(Source):
    """Ready batches in a list or tuple; the position counts batches."""

    def __init__(self, name: str, batches: Sequence[Batch], share: Share = WHOLE) -> None:
        self.name = name
        self.share = share
        self._batches = batches

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Return the batches from `position` on, in order."""
        batches = self._batches if position == 0 else itertools.islice(self._batches, position, None)
        if self.share.size > 1:
            return _every_round(batches, self)
        return zip(batches, itertools.repeat(1), itertools.repeat(None))

    def count(self, position: int = 0) -> int | None:
        """Return the number of batches, or rounds, left in the list."""
        return rounds(max(0, len(self._batches) - position), self.share)

    def description(self) -> dict[str, Any]:
        """Return the number of batches."""
        return {"kind": "a list of batches", "its number of batches": len(self._batches)}


def _every_round(batches: Iterable[Batch], source: Source) -> Iterator[SharedBatch]:
    """Yield one process's batches of data that every process iterates whole."""
    iterator, (rank, size) = iter(batches), source.share
    while together := list(itertools.islice(iterator, size)):
        is_placeholder = rank >= len(together)
        counts = [batch_size(each) for each in together]
        everywhere = None if None in counts else sum(counts)  # type: ignore[arg-type]
        evidence = None
        if source.needs_evidence:
            source.needs_evidence = False
            evidence = Evidence(None, fingerprint((together[0], together[-1])))
        which = 0 if is_placeholder else rank
        yield SharedBatch(together[which], len(together), counts[which], is_placeholder, everywhere, evidence)


class IterableSource(Source):
    """Any other iterable; the position counts batches.

    Each batch is drawn under a random stream of (seed, epoch, number), so that augmentation in this process
    resumes exactly. If the iterable has `state_dict` and `load_state_dict`, they skip the batches that were
    already used. Otherwise the batches are drawn again, and a warning says so.

    Every update calls `state_dict` and copies the result, even if no checkpoint is due. Whether a window is
    the last of its epoch shows only when the next batch is drawn, which moves the state. Whether the window
    is saved is decided after that, by a time, a metric, a signal or a callback. Keep the state small.

    Args:
        name: The data's name, for messages.
        data: The iterable.
        seed: The run's seed.
        share: The batch of every round that is used here; all are drawn.
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
        self.one_shot = iter(data) is data if isinstance(data, Iterator) else False

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Yield the batches of an epoch from a position on."""
        if self.share.size > 1:
            return _every_round((each[0] for each in self._all(epoch, position)), self)
        return self._all(epoch, position)

    def _all(self, epoch: int, position: int) -> Iterator[Fetched]:
        if self.one_shot and self._used_up:
            raise DataError(
                f"the {self.name} data is an iterator and was used up by an earlier epoch; pass something"
                " that can be iterated again (a list, a DataLoader, an object with __iter__), or"
                " max_epochs=1"
            )
        if self.stateful and epoch and not self._restored and not position:
            # A run that resumes here does the same, so both continue from the same state.
            self.restore(self.snapshot())
        number = 0 if not self._restored else position
        # A state from the end of an epoch may say "used up", which the next iteration resets.
        once_more = self._restored and not position
        if position and not self._restored:
            _LOG.warning(
                f"the {self.name} data cannot be resumed from its middle: its first {position} batches are"
                " drawn again and dropped. Give it state_dict and load_state_dict, or use a dataset with a"
                " length"
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
        """A hint for a DataLoader over an iterable, which has its own workers."""
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
        # Loaders with workers draw the workers' seeds here, which must not depend on what ran before.
        seed_batch(self._seed, epoch, -1)
        try:
            with workers_ignoring_signals(self._data):
                iterator = iter(self._data)
        except Exception as error:
            # A loader with persistent workers keeps its iterator.
            stays = getattr(self._data, "_iterator", None)
            raise self._failed(error, stays, number, epoch) from error
        if workers_of(iterator):
            watch_workers(iterator)
            self._begun = weakref.ref(iterator)
        return iterator

    def _failed(self, error: Exception, iterator: Any, number: int, epoch: int) -> DataError:
        """Return the error for a batch that could not be read."""
        ended = how_ended(iterator, error) or note_on(error)
        raised = None if ended else raised_in_worker(iterator, error)
        if raised is not None:
            which, what = raised
            return DataError(f"the {self.name} data raised at batch {number} of epoch {epoch}{which}: {what}")
        return self.failure(WorkerEnded(ended) if ended else error, number, epoch)

    def close(self) -> None:
        """End the loader's workers."""
        iterator = None if self._begun is None else self._begun()
        self._begun = None
        if iterator is not None and getattr(self._data, "_iterator", None) is iterator:
            self._data._iterator = None  # type: ignore[attr-defined]  # persistent workers would stay
        end(iterator)

    def skip_bad_batches(self) -> None:
        """Refuse, because an iterator that has raised is at its end.

        Raises:
            DataError: Always.
        """
        raise DataError(
            f"on_bad_batch='skip' with the {self.name} data, which is an iterable"
            f" ({type(self._data).__name__}): one that has raised is at its end, and the batches after a bad"
            " one cannot be read. Skip bad samples inside the iterable, give a dataset with a length, or use"
            " on_bad_batch='raise'"
        )

    def count(self, position: int = 0) -> int | None:
        """Return the number of batches, or rounds, left, if the iterable has a length."""
        try:
            return rounds(max(0, len(self._data) - position), self.share)  # type: ignore[arg-type]
        except TypeError:
            return None

    def snapshot(self) -> dict[str, Any] | None:
        """Return a copy of the iterable's state, because it is drawn from before the state is stored."""
        return copy.deepcopy(self._data.state_dict()) if self.stateful else None  # type: ignore[attr-defined]

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the iterable's own state."""
        if isinstance(self._data, Stateful) and state is not None:
            self._data.load_state_dict(copy.deepcopy(state))
            self._restored = True
