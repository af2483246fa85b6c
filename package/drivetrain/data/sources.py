"""The three kinds of data, all readable from any position of any epoch.

- indexed: a dataset with a length behind a DataLoader; its order is a function of (seed, epoch), its position
  is the number of samples already used, and resuming fetches none of them again;
- batches: a list or tuple of ready batches;
- iterable: any other iterable; resumed by its own state if it has one.
"""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from drivetrain.core.calendar import Calendar
from drivetrain.core.errors import CheckpointError, DataError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import batch_stream, mix_next, seed_after, seed_batch, seed_host
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size
from drivetrain.data.fingerprint import fingerprint
from drivetrain.data.protocols import has_state, length_of, order_settings, set_epoch
from drivetrain.data.rank_rounds import Evidence, SharedBatch, rounds
from drivetrain.data.repeats import Repeats
from drivetrain.data.shard import WHOLE, Shard
from drivetrain.data.skipped_batches import BadBatchSkipper, BadSample
from drivetrain.data.streams.skipping import skipping
from drivetrain.data.workers.ends import (
    WorkerEnded,
    how_ended,
    lacks_shared_memory,
    note_on,
    raised_in_worker,
    workers_of,
)
from drivetrain.data.workers.pool import LookAhead
from drivetrain.data.workers.signals import end, expect_deaths, workers_ignoring_signals
from drivetrain.distributed.failure.messages import summary
from drivetrain.distributed.ranks import ALONE, Ranks

_LOG = logger(__name__)

Fetched: TypeAlias = tuple[Batch, int, int | None] | SharedBatch
"""A batch as its source gave it, on the host; how far it moves the position; and its number of samples if the
source knows it. If several processes read the data, a `SharedBatch`."""


_OURS = re.compile(r"^(drivetrain\.[\w.]+\.)?(BadSample|DataError): ")
"""The name of an error of this package, which has another error's text."""


class Source(ABC):
    """Data that can be read from a position.

    Attributes:
        name: The data's name, for error messages.
        exact: Whether `count` is exact; an iterable's own length may be a guess.
        stateful: Whether it is resumed by its own state rather than by the position.
        one_shot: Whether it is an iterator, which can be read once.
        shard: The shard that this process reads of every round.
        ranks: The processes that read the data.
        seed: The seed of its order, and of random numbers that loading draws; 0 if each process reads data of
            its own.
        batch_size: The number of samples of a whole batch of one process, if known.
        drop_last: Whether samples that fill no batch are left out, if positions count samples.
        knows_samples: Whether the number of samples in a batch is known without a look at its tensors.
        is_split: Whether each process reads data of its own, rather than its part of common data.
        is_part: Whether it is this process's part of data that is split, which may end before the others'
            parts.
        part_has_ended: Whether this process's part has ended in the epoch that is resumed, if data is split.
        needs_evidence: Whether the next round must come with its `Evidence`.
        skipper: Replaces a batch that cannot be made with `BAD`; None raises.
        dataset: The user's dataset, if there is one.
        loader: What makes its batches: a loader of the user's or of this package, or the data itself.
        made_ahead: Whether worker processes make the batches, ahead of the steps that use them.
        calendar: The windows of the fit, if batch sizes change; only for a source with `samples_per_epoch`.
    """

    name: str
    exact: bool = True
    stateful: bool = False
    one_shot: bool = False
    shard: Shard = WHOLE
    ranks: Ranks = ALONE
    seed: int = 0
    batch_size: int | None = None
    drop_last: bool = False
    knows_samples: bool = False
    is_split: bool = False
    is_part: bool = False
    part_has_ended: bool = False
    needs_evidence: bool = False
    skipper: BadBatchSkipper | None = None
    dataset: Any = None
    loader: Any = None
    made_ahead: bool = False
    calendar: Calendar | None = None

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples in an epoch's order, if positions count them and every batch is of `batch_size`."""
        return None

    def skip_bad_batches(self) -> None:
        """From now on, replace each batch that cannot be made with `BAD`.

        Raises:
            DataError: The data cannot be read any further after such a batch.
        """

    def waiting(self, epoch: int, number: int) -> str:
        """Describe the batch that a reader waits for, and which process makes it. Thread-safe."""
        return f"batch {number} of epoch {epoch} of the {self.name} data"

    @abstractmethod
    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Yield the batches of `epoch` from `position` on.

        Raises:
            DataError: The data raised; names the batch.
        """

    def begin(self, epoch: int, position: int, limit: int | None, following: LookAhead) -> None:
        """Ask for the data's length, and start to make the next batches ahead of their use.

        All processes call it as an epoch begins.

        Args:
            epoch: The epoch.
            position: Where to begin.
            limit: The maximum number of its batches; None for all.
            following: The epochs that are read after it.

        Raises:
            DataError: The batches cannot be made, or the lengths of the processes differ.
            CheckpointError: The epoch is resumed, and had another length.
        """

    def close(self) -> None:
        """End the workers that make batches ahead; reading again starts new ones."""

    @abstractmethod
    def count(self, position: int = 0) -> int | None:
        """Return the number of batches of an epoch from `position` on; None if unknown."""

    def number(self, position: int) -> int:
        """Return the number that the batch at a position has in its epoch, for error messages."""
        return position

    def start(self, epoch: int, number: int) -> int:
        """Return the position at which a batch of an epoch begins."""
        return number

    def description(self) -> dict[str, Any]:
        """Return properties, by name, that must be equal in all processes that read this data together."""
        return {"kind": "an iterable"}

    def snapshot(self) -> dict[str, Any] | None:
        """Return the data's own state; None for data that is resumed by its position."""
        return None

    def gathered(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Gather the states that the processes' data have; all processes call it, each with its own."""
        return state

    def own_part(self, gathered: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return this process's part of a result of `gathered`."""
        return gathered

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore a `snapshot` of this process, before `batches` is called with the matching position."""

    def seed_epoch(self, epoch: int) -> None:
        """Seed what the data draws from the host's generators as it begins an epoch."""

    def order_state(self) -> dict[str, Any]:
        """Return what a position within an epoch depends on: the kind of data, settings by name, the length.

        A user's sampler adds what is needed to draw its order again.
        """
        return {"settings": {"its kind": self.description()["kind"]}, "length": None}

    def restore_order(self, before: dict[str, Any], position: int) -> None:
        """Restore an `order_state`; warn if the order has changed.

        Args:
            before: The checkpoint's `order_state`.
            position: The run's position in its epoch.

        Raises:
            CheckpointError: The position is within an epoch, and depends on something that has changed.
        """
        if position:
            now = self.order_state()
            self._refuse_other_settings(before, now)
            self._refuse_other_length(before, now["length"], "batches")

    def _refuse_other_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, was in before.get("settings", {}).items():
            if (found := now["settings"].get(name)) != was:
                raise self._other_data(f"{name} was {was!r} and is {found!r} now", "Give it as before")

    def _refuse_other_length(self, before: Mapping[str, Any], now: int | None, unit: str) -> None:
        was = before.get("length")
        if was is not None and now is not None and was != now:
            raise self._other_data(
                f"the epoch had {was} {unit}, and there are {now} now",
                f"Give it the {was} {unit}, at the latest in on_epoch_start,",
            )

    def _other_data(self, what: str, instead: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint was saved within an epoch of the {self.name} data, and this data has changed:"
            f" {what}. Its position would be at other samples, so some would be lost and others come twice."
            f" {instead} until the epoch ends, resume from a checkpoint at the end of an epoch, or begin this"
            " data at its start: fit(..., new_data=True)"
        )

    def failure(self, error: Exception, number: int, epoch: int, detail: str = "") -> DataError:
        """Return an error that names the batch that could not be made."""
        batch_name = f"batch {number} of epoch {epoch}{detail}"
        if isinstance(error, WorkerEnded):
            return DataError(f"the {self.name} data cannot be read on; {batch_name} never came: {error}")
        is_group = isinstance(error, ExceptionGroup)
        what = summary(error) if is_group else f"{type(error).__name__}: {error}"
        return self.raised(batch_name, what)

    def raised(self, batch_name: str, what: str) -> DataError:
        """Return a `DataError` with another error's text."""
        return DataError(f"the {self.name} data raised at {batch_name}: {_OURS.sub('', what)}")


class BatchSource(Source):
    """Ready batches in a list or tuple; the position counts batches."""

    def __init__(self, name: str, batches: Sequence[Batch], shard: Shard = WHOLE) -> None:
        self.name = name
        self.shard = shard
        self._batches = batches

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Return the batches from `position` on, in order."""
        batches = self._batches if position == 0 else itertools.islice(self._batches, position, None)
        if self.shard.size > 1:
            return _every_round(batches, self)
        return zip(batches, itertools.repeat(1), itertools.repeat(None))

    def count(self, position: int = 0) -> int | None:
        """Return the number of batches, or rounds, left in the list."""
        return rounds(max(0, len(self._batches) - position), self.shard)

    def description(self) -> dict[str, Any]:
        return {"kind": "a list of batches", "its number of batches": len(self._batches)}

    def order_state(self) -> dict[str, Any]:
        return super().order_state() | {"length": len(self._batches)}


def _every_round(batches: Iterable[Batch], source: Source) -> Iterator[SharedBatch]:
    """Yield one process's batches of data that every process iterates whole."""
    iterator, (rank, size) = iter(batches), source.shard
    while together := list(itertools.islice(iterator, size)):
        is_placeholder = rank >= len(together)
        counts = [batch_size(each) for each in together]
        total = None if None in counts else sum(counts)  # type: ignore[arg-type]
        evidence = None
        if source.needs_evidence:
            source.needs_evidence = False
            evidence = Evidence(None, fingerprint((together[0], together[-1])))
        which = 0 if is_placeholder else rank
        yield SharedBatch(together[which], len(together), counts[which], is_placeholder, total, evidence)


class IterableSource(Source):
    """Any other iterable; the position counts batches.

    Each batch is drawn under a random stream of (seed, epoch, number), so that augmentation in this process
    resumes exactly. If the iterable has `state_dict` and `load_state_dict`, they skip the batches that were
    already used. Otherwise the batches are drawn again, and a warning says so. A `state_dict` that takes
    arguments is for a loader of its own package, and is not used.

    Every step calls `state_dict` and copies the result, even if no checkpoint is due. Whether a window is
    the last of its epoch shows only when the next batch is drawn, which moves the state. Whether the window
    is saved is decided after that, by a time, a metric, a signal or a callback. Keep the state small.

    Args:
        shard: The batch of every round that is used here; all are drawn.
    """

    def __init__(self, name: str, data: Iterable[Batch], seed: int, shard: Shard = WHOLE) -> None:
        self.name = name
        self.shard = shard
        self._data = data
        self._seed = seed
        self.exact = False
        self.stateful = has_state(data)
        self._workers = workers = data.num_workers if isinstance(data, DataLoader) else 0
        self.made_ahead = self._workers > 0
        self._repeats = Repeats(name, workers) if workers > 1 and shard.rank == 0 else None
        self._length_checked = shard.rank > 0
        self._restored = False
        self._used_up = False
        self._begun: weakref.ref[Any] | None = None
        # Data with a length begins anew by its __iter__; a generator has no length.
        self.one_shot = isinstance(data, Iterator) and iter(data) is data and not hasattr(data, "__len__")

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Yield the batches of an epoch from a position on."""
        if self.shard.size > 1:
            return _every_round((each[0] for each in self._all(epoch, position)), self)
        return self._all(epoch, position)

    def _all(self, epoch: int, position: int) -> Iterator[Fetched]:
        if self.one_shot and self._used_up:
            raise DataError(
                f"the {self.name} data is an iterator and was used up by an earlier epoch; pass something"
                " that can be iterated again (a list, a DataLoader, an object with __iter__), or"
                " max_epochs=1"
            )
        number = position if self._restored else 0
        # A state from the end of an epoch may say "used up", which the next iteration resets.
        once_more = self._restored and not position
        if position > number:
            _LOG.warning(
                f"the {self.name} data has no state, so its first {position} batches are drawn again and"
                " dropped. The resume is exact if they are the same batches: the seed, batch_size and"
                " num_workers must be those of the checkpoint. To resume without drawing, give it"
                " state_dict() and load_state_dict(state), or use a dataset with an index (__len__ and"
                " __getitem__)"
            )
        is_whole, self._restored = not number, False
        repeats = None if position else self._repeats
        iterator = self._begin(epoch, number)
        stream = batch_stream(self._seed, epoch)
        while True:
            seed = mix_next(stream, number)
            seed_host(seed)
            try:
                batch = next(iterator)
            except StopIteration:
                if once_more:
                    once_more, iterator = False, self._begin(epoch, number)
                    continue
                self._end(number, position, is_whole, repeats)
                return
            except Exception as error:
                batch = self._left_out(error, iterator, number, epoch)
            else:
                repeats = self._note_read(batch, repeats)
            once_more = False
            seed_after(seed)
            number += 1
            if number > position:
                yield batch, 1, None

    def _note_read(self, batch: Batch, repeats: Repeats | None) -> Repeats | None:
        """Note that a batch was read; return what looks for repeated samples as long as it looks."""
        if self.skipper is not None:
            self.skipper.note_good()
        if repeats is not None and not repeats.note(batch):
            repeats = self._repeats = None
        return repeats

    def _end(self, number: int, position: int, is_whole: bool, repeats: Repeats | None) -> None:
        """Note that the data has ended after a number of batches."""
        if number < position and not self.is_part:
            what = f"it ends after {number} batches, and {position} were used"
            raise self._other_data(what, "Give it as before")
        self._used_up = True
        if repeats is not None:
            repeats.check(at_end=True)
            self._repeats = None
        if is_whole:
            self._check_length(number)

    def _check_length(self, number: int) -> None:
        length = None if self._length_checked else length_of(self._data)
        # Each worker's last batch may be short, so that there are more, or left out.
        if length is None or abs(number - length) < max(self._workers, 1):
            return
        self._length_checked = True
        missing = (
            f" {length - number} batches are missing, and the epoch counts as complete. If the stream"
            " broke off, let it raise an error instead of ending; otherwise"
        )
        _LOG.warning(
            f"the {self.name} data ended after {number} batches, and its length is {length}:"
            f"{missing if number < length else ''} correct its __len__, which the schedule relies on"
        )

    def _begin(self, epoch: int, number: int) -> Iterator[Batch]:
        for each in (self._data, getattr(self._data, "dataset", None), getattr(self._data, "sampler", None)):
            set_epoch(each, epoch)
        # Loaders with workers draw the workers' seeds here, which must not depend on what ran before.
        self.seed_epoch(epoch)
        try:
            with workers_ignoring_signals(self._data):
                iterator = iter(self._data)
        except Exception as error:
            # A loader with persistent workers keeps its iterator.
            stays = getattr(self._data, "_iterator", None)
            raise self._failed(error, stays, number, epoch) from error
        if workers_of(iterator):
            expect_deaths(iterator)
            self._begun = weakref.ref(iterator)
        return iterator

    def _left_out(self, error: Exception, iterator: Any, number: int, epoch: int) -> Any:
        """Return the placeholder for a batch that could not be read, or raise."""
        failure = self._failed(error, iterator, number, epoch)
        # A DataError says that the data cannot be read on.
        if (
            self.skipper is None
            or isinstance(error, DataError)
            or how_ended(iterator, error)
            or note_on(error)
        ):
            raise failure from error
        return self.skipper.skip(failure, error, "sample" if isinstance(error, BadSample) else "batch")

    def _failed(self, error: Exception, iterator: Any, number: int, epoch: int) -> DataError:
        """Return the error for a batch that could not be read."""
        ended = how_ended(iterator, error) or note_on(error)
        raised = None if ended else raised_in_worker(iterator, error)
        advice = None if ended else lacks_shared_memory(error)
        if raised is not None:
            which, what = raised
            failure = self.raised(f"batch {number} of epoch {epoch}{which}", what)
        else:
            state = ""
            if self.stateful and not isinstance(error, BadSample):  # which names the state
                with suppress(Exception):  # the state of data that has just raised
                    state = f" (its state: {str(self.snapshot())[:300]})"
            failure = self.failure(WorkerEnded(ended) if ended else error, number, epoch, state)
        return failure if advice is None else DataError(f"{failure}; {advice}")

    def close(self) -> None:
        iterator = None if self._begun is None else self._begun()
        self._begun = None
        if iterator is not None and getattr(self._data, "_iterator", None) is iterator:
            self._data._iterator = None  # type: ignore[attr-defined]  # persistent workers would stay
        end(iterator)

    def skip_bad_batches(self) -> None:
        """Leave out samples that raise, and batches whose collate function raises."""
        if self.shard.size > 1:
            raise DataError(
                f"on_bad_batch='skip' with the {self.name} data, which each of {self.shard.size} processes"
                f" reads whole ({type(self._data).__name__}): a sample that raises on one of them only would"
                " shift its order. Divide the stream by a method shard(num_shards, index) or by"
                " already_split, or use on_bad_batch='raise'"
            )
        self._data = skipping(self._data, self.name)
        self.skipper = BadBatchSkipper()
        self._length_checked = True  # a sample that is left out may leave a batch more, or less

    def count(self, position: int = 0) -> int | None:
        """Return the number of batches, or rounds, left, if the iterable has a length."""
        length = length_of(self._data)
        return None if length is None else rounds(max(0, length - position), self.shard)

    def snapshot(self) -> dict[str, Any] | None:
        """Return a copy of the iterable's state, because it is drawn from before the state is stored."""
        return copy.deepcopy(self._data.state_dict()) if self.stateful else None  # type: ignore[attr-defined]

    def restore(self, state: dict[str, Any] | None) -> None:
        if self.stateful and state is not None:
            self._data.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
            self._restored = True

    def order_state(self) -> dict[str, Any]:
        """Return what a number of batches depends on, or a state."""
        order = order_settings(getattr(self._data, "dataset", self._data)) or "the stream's own"
        if self.stateful:
            kind = "an iterable with a state of its own"
            return {"settings": {"its kind": kind, "its order": order}, "length": None}
        settings = {
            "its kind": "an iterable without a state",
            "its order": order,
            **{f"its {name}": getattr(self._data, name, None) for name in ("batch_size", "num_workers")},
        }
        settings |= {name: None for name, value in settings.items() if not isinstance(value, (int, str))}
        return {"settings": settings, "length": length_of(self._data)}

    def seed_epoch(self, epoch: int) -> None:
        """Seed what a loader draws as it begins, also if its first `state_dict` makes it begin."""
        seed_batch(self._seed, epoch, -1)
