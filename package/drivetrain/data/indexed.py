"""Datasets with a length: an order that is a function of (seed, epoch), read from any position.

The user's DataLoader is only a description (dataset, batch size, sampler, collation, workers). Its sampler is
replaced by index batches with their own key (seed, epoch, position). So a batch is the same whether it is
made here or in a worker, and whatever was made before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain.core.errors import DataError
from drivetrain.core.random_streams import ORDER, batch_stream, mix, mix_next, peek, seed_host
from drivetrain.data.fingerprint import Fingerprint
from drivetrain.data.keyed_batches import (
    IndexBatch,
    KeyedDataset,
    WithDraws,
    WorkerStart,
    may_draw,
    single_item,
)
from drivetrain.data.orders.by_tokens import check_batches_by_tokens
from drivetrain.data.orders.order import (
    FORMULA,
    OWN,
    SHUFFLED,
    Order,
    composition,
    refuse_divided,
    undivided,
    unshuffled,
)
from drivetrain.data.orders.passes import OrderedByItself, refuse_wrapped
from drivetrain.data.protocols import length_of, order_settings, set_epoch
from drivetrain.data.rank_rounds import Evidence, SharedBatch, drawn, grouped, rounds, sliced
from drivetrain.data.shard import WHOLE, Shard
from drivetrain.data.skipped_batches import BAD, BadBatchSkipper, Raised
from drivetrain.data.sources import Fetched, Source
from drivetrain.data.workers.ends import lacks_shared_memory
from drivetrain.data.workers.pool import LookAhead, RequestedBatches, Workers

_SHOWN = 32
"""The number of a batch's indices that an error names."""


class IndexedSource(Source):
    """A dataset with a length; the position counts samples.

    Args:
        name: The data's name, for messages.
        loader: The user's DataLoader, read as a description.
        seed: The run's seed.
        every_sample: Read the last, short batch even if the loader drops it: an evaluation counts every
            sample. A user's batch sampler keeps its batches.
        in_order: Read the dataset in its own order even if the loader shuffles; see `unshuffled`. A sampler
            or batch sampler of the user's own class keeps its order.
        pin_memory: Pin the workers' batches, for copies to an accelerator. The loader's own flag is ignored:
            without an accelerator torch warns of it.
        shard: The shard of every round that is read here.
        reader: This process's number among several that read data of their own, each under its own random
            streams. Their orders are the same, so that data that is shuffled before it is divided stays
            divided.
    """

    def __init__(
        self,
        name: str,
        loader: DataLoader[Any],
        seed: int,
        *,
        in_order: bool = False,
        every_sample: bool = False,
        pin_memory: bool = False,
        shard: Shard = WHOLE,
        reader: int = 0,
    ) -> None:
        self.name = name
        self.shard = shard
        self._seed = seed
        self._batch_seed = mix(seed, reader) if reader else seed
        self._loader = loader
        ready = loader.batch_sampler is None
        self.dataset = loader.dataset
        self._draws = may_draw(loader.dataset, loader.collate_fn)
        self._dataset = KeyedDataset(loader.dataset, self._draws, not ready)
        self._size = size = len(self._dataset)  # as the last epoch began, and in the workers' copies
        # A user's BatchSampler, unlike the loader's own, leaves the loader's batch_size None and its sampler
        # sequential; the batch sampler itself is right in both cases.
        plain = type(loader.batch_sampler) is BatchSampler
        described: Any = loader.batch_sampler if plain else loader
        check_batches_by_tokens(loader)
        sampler = self._sampler(described.sampler, in_order, every_sample)
        self._order = Order(name, sampler, size, seed)
        self._batch_sampler = None if ready or plain else loader.batch_sampler
        if shard.size > 1:
            refuse_divided(self._batch_sampler, name)
        batch_size = described.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self.batch_size = batch_size if isinstance(batch_size, int) and not ready else None
        self._batch_size: int = self.batch_size or 1
        self._numbers: dict[int, int] = {}  # for a user's batch sampler: each batch's number by its start
        reads_all = ready or (every_sample and loader.batch_size is not None)
        self.drop_last = bool(described.drop_last) and not reads_all
        self.knows_samples = not ready
        self._noted: tuple[str, int] | None = None
        self._epoch_length: int | None = None
        self._resumed: tuple[dict[str, Any], int] | None = None  # what `restore_order` was given
        # The length of a user's own sampler may be a guess; that of torch's two is exact.
        self.exact = self._batch_sampler is None and self._order.known
        self._collate = partial(single_item, loader.collate_fn) if ready else loader.collate_fn
        self._pin_memory = pin_memory
        self.made_ahead = loader.num_workers > 0
        self._workers = self._make_workers()

    def _sampler(self, sampler: Any, in_order: bool, every_sample: bool) -> Any:
        """Return the sampler of the whole dataset that stands for the user's."""
        if isinstance(self.dataset, OrderedByItself):
            return self.dataset.sampler_for(self._loader, self.name, self._seed, is_training=not every_sample)
        refuse_wrapped(self.dataset, self.name)
        sampler = sampler if self.shard.size == 1 else undivided(sampler, self.name)
        return unshuffled(sampler) if in_order else sampler

    def _make_workers(self) -> Workers | None:
        if not self.made_ahead:
            return None
        # A user's sampler runs when its epoch begins, because it may depend on what was done until then.
        goes_on = self._loader.persistent_workers and self.exact
        return Workers(self._with_workers, self.index_batches, goes_on, self._failure_of)

    def _with_workers(self, asked: RequestedBatches, epoch: int) -> DataLoader[Any]:
        loader = self._loader
        # Workers draw their seeds from this generator. Starting them must not move the global stream, and
        # what ran before must not move the seeds. Persistent ones have the same wherever the run began.
        seed = mix(ORDER, self._seed) if loader.persistent_workers else mix(ORDER, self._seed, epoch)
        return DataLoader(
            self._dataset,  # type: ignore[arg-type]
            batch_sampler=asked,
            num_workers=loader.num_workers,
            collate_fn=WithDraws(self._dataset, self._collate),
            pin_memory=self._pin_memory,
            timeout=loader.timeout,
            worker_init_fn=WorkerStart(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            generator=torch.Generator().manual_seed(seed),
        )

    def index_batches(self, epoch: int, position: int) -> Iterator[IndexBatch]:
        """Return an epoch's index batches from a position on, each with its key; draws the order at once."""
        return self._keyed(self._slices(epoch, position), epoch)

    def _keyed(self, slices: Iterator[Any], epoch: int) -> Iterator[IndexBatch]:
        """Yield the index batch of each slice, with its key (seed, epoch, position)."""
        stream, is_alone = batch_stream(self._batch_seed, epoch), self.shard.size == 1
        for each in slices:
            start, indices = each[0], each[1]
            batch = IndexBatch(indices.tolist() if isinstance(indices, torch.Tensor) else indices)
            batch.epoch, batch.start, batch.seed = epoch, start, mix_next(stream, start)
            if not is_alone:
                # Without its indices: a view of the epoch's order would go to workers through shared memory.
                batch.slice = each._replace(items=None, whole=None)
                if self.needs_evidence:
                    self.needs_evidence = False
                    self._note_order(batch, each.whole)
            yield batch

    def _slices(self, epoch: int, position: int) -> Iterator[Any]:
        """Return this process's slices of an epoch's order, from a position on."""
        if self._batch_sampler is not None:
            return grouped(
                self._sampled(self._order.replayed(self._batch_sampler, epoch), position), self.shard
            )
        size = self._batch_size
        if self._order.length() is None:
            take = drawn(islice(self._order.replayed(self._order.sampler, epoch), position, None))
        else:
            order = self._order.indices(epoch)
            if self.calendar is None and self.shard.size == 1:
                # Python's own iterators: a generator here would be one more call in every step.
                end = len(order) - size + 1 if self.drop_last else len(order)
                starts = range(position, end, size)
                ends = range(position + size, end + size, size)
                return zip(starts, map(order.__getitem__, map(slice, starts, ends)), strict=True)

            def take(start: int, stop: int) -> Any:
                return order[start:stop]

        sizes = repeat(size) if self.calendar is None else self.calendar.batch_sizes(epoch)
        return sliced(take, position, sizes, self.drop_last, self.shard)

    def _note_order(self, batch: IndexBatch, whole: Any) -> None:
        """Note a round's indices, and have some of its samples fingerprinted with one of its batches."""
        grouped_ = self._batch_sampler is not None
        listed = whole.tolist() if isinstance(whole, torch.Tensor) else list(whole)
        listed = [index for each in listed for index in each] if grouped_ else listed
        first = f"[{', '.join(map(str, listed[:4]))}{', ...' if len(listed) > 4 else ''}]"
        self._noted = first, zlib.crc32(repr(listed).encode())
        batch.probe = batch_stream(self._seed, batch.epoch), [listed[0], listed[len(listed) // 2], listed[-1]]

    def _sampled(self, batches: Iterable[Any], position: int) -> Iterator[tuple[int, Any]]:
        start = 0
        for number, indices in enumerate(batches):
            end = start + len(indices)
            if end > position:
                # A position from other batch boundaries may lie inside one of these batches.
                used = max(0, position - start)
                self._numbers[start + used] = number
                yield start + used, indices[used:] if used else indices
            start = end

    @property
    def samples_per_epoch(self) -> int | None:
        """The number of samples of an epoch that begins now."""
        return self._order.length() if self.batch_size is not None and self._batch_sampler is None else None

    def begin(self, epoch: int, position: int, limit: int | None, following: LookAhead) -> None:
        """Ask for the dataset's length, and let the workers, if any, make the batches that are read next."""
        self._take_length(epoch)
        if self._workers is not None:
            self._workers.begin(epoch, position, limit, following)

    def _take_length(self, epoch: int) -> None:
        """Take the dataset's length for an epoch. Workers with a copy of another length start anew."""
        size = len(self._dataset)
        set_epoch(self._order.sampler, epoch)  # whose length may depend on it
        for rank, other in enumerate(self.ranks.all_gather(size) if self.shard.size > 1 else ()):
            if other != size:
                raise DataError(
                    f"the {self.name} data has {size} samples on rank {self.shard.rank} and {other} on rank"
                    f" {rank} as epoch {epoch} begins. Make the same change on all ranks"
                )
        if size != self._size:
            if self._order.is_grouped:
                raise DataError(
                    f"the {self.name} data has {size} samples in epoch {epoch} and had {self._size} before."
                    " group_by_length and LengthGroupedSampler need data that keeps its number of samples"
                )
            self._size = size
            self._order.forget()
            self.close()
        self._epoch_length = self._order.length()
        self._take_over_order(epoch)

    def _take_over_order(self, epoch: int) -> None:
        """Restore the order of a checkpoint's epoch, once `on_epoch_start` was called.

        Raises:
            CheckpointError: The data had another length.
        """
        if self._resumed is None:
            return
        (before, position), self._resumed = self._resumed, None
        if position and (self.exact or "settings" in before):
            now = self.order_state()
            self._refuse_other_length(before, now["length"], "samples")
            if before.get("parts", now["parts"]) != now["parts"]:
                what = "the indices of its Subset, or the lengths in its ConcatDataset, are others"
                raise self._other_data(
                    what, "Give the same, such as by a generator with a seed for random_split,"
                )
        if not self.exact and (order := before.get("order")) is not None:
            self._order.restore(self._batch_sampler or self._order.sampler, order, position)

    def batches(self, epoch: int, position: int) -> Iterator[Fetched]:
        """Yield the batches of an epoch from a position on."""
        if self._workers is not None:
            return self._made_by_workers(self._workers.read(epoch, position))
        return self._made_here(epoch, position)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def skip_bad_batches(self) -> None:
        """Leave out batches that raise: each is a function of its indices, so the next can be made."""
        self.skipper = BadBatchSkipper()

    def waiting(self, epoch: int, number: int) -> str:
        """Describe a batch that is waited for, and which worker makes it, if one does."""
        text = super().waiting(epoch, number)
        if self._workers is not None:
            return f"{text}, which {self._workers.waiting()}"
        return f"{text}, which {type(self._dataset.dataset).__name__}.__getitem__ or the collate_fn makes"

    def _made_here(self, epoch: int, position: int) -> Iterator[Fetched]:
        fetch, collate, knows = self._dataset.__getitems__, self._collate, self.knows_samples
        skipper, draws = self.skipper, self._draws
        for indices in self.index_batches(epoch, position):
            try:
                batch = collate(fetch(indices))
            except Exception as error:
                failure = self._failure_of(error, indices)
                if skipper is None:
                    raise failure from error
                batch = skipper.skip(failure, error)
            else:
                if skipper is not None:
                    skipper.note_good()
            if draws:
                peek()
            if indices.slice is not None:
                yield self._shared_batch(batch, indices, self._dataset.fingerprint)
                continue
            size = len(indices)
            yield batch, size, size if knows else None

    def _made_by_workers(self, made: Iterator[tuple[Any, IndexBatch]]) -> Iterator[Fetched]:
        for each, indices in made:
            batch, draws, contents = each if type(each) is not Raised else self._bad(each, indices)
            if self.skipper is not None and batch is not BAD:
                self.skipper.note_good()
            # The same state as after a batch made here, so that a step that draws from the host's generators
            # does not depend on the number of workers.
            if draws is not None:
                draws.restore()
            elif self._draws:
                seed_host(indices.seed)
                peek()
            if indices.slice is not None:
                yield self._shared_batch(batch, indices, contents)
            else:
                yield batch, len(indices), len(indices) if self.knows_samples else None

    def _bad(self, raised: Raised, indices: IndexBatch) -> tuple[Any, None, None]:
        """Return the placeholder for a batch that a worker could not make, or raise."""
        error = raised.error()
        failure = self._failure_of(error, indices, f", in worker {raised.worker} (pid {raised.pid})")
        advice = lacks_shared_memory(error)
        try:
            if advice is not None:  # the batch is not to blame
                raise DataError(f"{failure}; {advice}") from error
            if self.skipper is None:
                raise failure from error
            return self.skipper.skip(failure, error), None, None
        except DataError:
            self.close()
            raise

    def _failure_of(self, error: Exception, indices: IndexBatch | None, where: str = "") -> DataError:
        if indices is None:
            return DataError(
                f"the {self.name} data raised before its first batch: {type(error).__name__}: {error}"
            )
        start = indices.start
        if (now := len(self._dataset)) < self._size:
            where += (
                f"; it had {self._size} samples as the epoch began and has {now}: change it between epochs"
            )
        shown = ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")
        if not len(indices):
            return self.failure(error, self.number(start), indices.epoch, f" (a batch of no samples){where}")
        position = f"samples {start} to {start + len(indices) - 1} of its order, dataset indices [{shown}]"
        return self.failure(error, self.number(start), indices.epoch, f" ({position}){where}")

    def number(self, position: int) -> int:
        """Return a batch's number. A user's batch sampler must have been drawn that far."""
        if self.calendar is not None:
            return self.calendar.batches_before(position)
        return self._numbers.get(position, position // self._batch_size)

    def count(self, position: int = 0) -> int | None:
        """Return the number of batches from a position on; for a user's batch sampler, only at position 0."""
        if self._batch_sampler is not None:
            batches = length_of(self._batch_sampler)
            return None if position or batches is None else rounds(batches, self.shard)
        length = self._order.length()
        if length is None:
            return None
        left = max(0, length - position)
        batches = left // self._batch_size if self.drop_last else -(-left // self._batch_size)
        return rounds(batches, self.shard)

    def start(self, epoch: int, number: int) -> int:
        """Return the position at which a batch begins; draws a user's batch sampler that far."""
        self._take_length(epoch)
        if self._batch_sampler is None or number == 0:
            return number * self._batch_size
        return sum(len(each) for each in islice(self._order.replayed(self._batch_sampler, epoch), number))

    def order_state(self) -> dict[str, Any]:
        """Return what a position depends on; of a sampler of the user also its state and a checksum."""
        order, parts = self._order.state(), composition(self._loader.dataset)
        own = order_settings(self.dataset if self._batch_sampler is None else self._batch_sampler) or OWN
        settings = {"its kind": "a dataset", "its order": self._order.kind if self.exact else own}
        # The length of a user's sampler may depend on what has happened to it.
        length = self._epoch_length if self.exact else self._size
        state = {"settings": settings, "length": length, "parts": parts}
        return state | ({} if order is None else {"order": order})

    def restore_order(self, before: dict[str, Any], position: int) -> None:
        """Restore the user's sampler, and compare the order: within an epoch once that epoch begins, because
        `on_epoch_start` may change the dataset.
        """
        if position:
            # Checkpoints without settings are older than the formula.
            of_old = {"settings": {"its order": SHUFFLED}} if self._order.kind == FORMULA else {}
            self._refuse_other_settings({**of_old, **before}, self.order_state())
        self._resumed = before, position
        if not position:
            self._take_over_order(0)

    def description(self) -> dict[str, Any]:
        """Return the dataset's and the loader's numbers."""
        loader = self._loader
        described: Any = loader if loader.batch_sampler is None else loader.batch_sampler
        return {
            "kind": "a dataset",
            "the number of samples in its dataset": len(self._dataset),
            "its batch size": self._batch_size if self.calendar is None else repr(self.calendar.batch_size),
            "its drop_last": self.drop_last,
            "the seed of its order": self._seed,
            "its sampler": type(getattr(described, "sampler", described)).__name__,
            "its number of samples in an epoch": self._order.length(),
            "its number of batches": self.count() if loader.batch_sampler is not None else None,
        }

    def _shared_batch(self, batch: Any, indices: IndexBatch, contents: Fingerprint | None) -> SharedBatch:
        part = indices.slice
        assert part is not None
        samples, total = (len(indices), part.samples) if self.knows_samples else (None, None)
        evidence = None if indices.probe is None else Evidence(self._noted, contents)
        return SharedBatch(batch, part.advance, samples, part.is_placeholder, total, evidence)
