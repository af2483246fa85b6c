"""Data that the processes have divided themselves: each reads its own, all in the same number of rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from drivetrain.core.errors import CheckpointError, DataError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import preserved
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size, to_host
from drivetrain.data.fingerprint import as_text, fingerprint
from drivetrain.data.rank_rounds import Evidence, SharedBatch
from drivetrain.data.shard import Shard, can_be_divided, shards_of
from drivetrain.data.skipped_batches import BAD
from drivetrain.data.sources import Source
from drivetrain.data.workers.pool import LookAhead
from drivetrain.distributed.processes import asked_alone
from drivetrain.distributed.ranks import Ranks

_LOG = logger(__name__)

_PARTS = "of_each_rank"
"""The key in a checkpoint for the states of divided data."""

_OF_THE_PART = (
    "skip_bad_batches",
    "waiting",
    "close",
    "snapshot",
    "restore",
    "seed_epoch",
    "order_state",
    "restore_order",
)
"""The methods of divided data that are those of this process's part."""


@dataclass(frozen=True)
class AlreadySplit:
    """Data that is already divided; see `already_split`.

    Attributes:
        data: This process's part.
        divided_for_one: Where the program had asked for the world size before its ranks were started, so that
            rank 0 may have the whole; None if it had not, or if this was made after that.
        first: The first sample of the first part, if this is a part of a stream that `divided` has divided.
    """

    data: Any
    divided_for_one: str | None = None
    first: str | None = None

    @property
    def batch_size(self) -> Any:
        """The batch size of this process's part, if it has one."""
        return getattr(self.data, "batch_size", None)

    def part(self, shard: Shard) -> Any:
        """Return the data of a process, which is made now if a function makes it."""
        is_function = callable(self.data) and not hasattr(self.data, "__iter__")
        return self.data(*shard) if is_function and not isinstance(self.data, Dataset) else self.data


def divided(data: Any, name: str, shard: Shard, divides: bool) -> Any:
    """Return a process's part of a stream, or of a loader of one, that can be divided; else the data itself.

    Without `divides` it is the data itself, too.

    Each process begins the first part too, because parts of streams that differ would not have each sample
    once.
    """
    stream: Any = data.dataset if isinstance(data, DataLoader) else data
    if not divides or shard.size == 1 or not can_be_divided(stream):
        return data
    if (count := shards_of(stream)) < shard.size:
        if shard.rank == 0:
            _LOG.info(
                f"the {name} data has {count} shards, fewer than the {shard.size} ranks, so each rank reads"
                " all of it and uses its part"
            )
        return data
    with preserved():
        first = next(iter(stream.shard(shard.size, 0)), None)
    part = stream.shard(shard.size, shard.rank)
    if stream is not data:
        loader = copy.copy(data)
        vars(loader)["dataset"] = part  # which a loader does not let one set
        part = loader
    return AlreadySplit(part, None, as_text(fingerprint(first)))


def already_split(data: Any) -> AlreadySplit:
    """Mark data as one process's own part, so that it is not divided again.

    Use it for data that is already divided by rank: shards of a stream (WebDataset's `split_by_node`), a
    sampler that gives every rank its own indices, files of each machine. Parts may differ in length: an epoch
    ends with the longest part, and a rank without further batches takes part in the steps with weight zero.

    A checkpoint stores the number of batches that each process has used, and the state of each process's
    iterable if it has one. So resuming in the middle of an epoch needs the same number of processes. On one
    process the data is read like any other.

    Args:
        data: A DataLoader, a Dataset, a list of batches, any other iterable of batches, or for evaluation a
            mapping of names to these. Or a function that makes a process's data from its rank and the number
            of ranks: `already_split(lambda rank, size: Files(files[rank::size]))`. It is called once the
            ranks are connected. Neighbours that share their batches (`tensor_parallel`) have one rank there.
    """
    return AlreadySplit(data, asked_alone())


class SplitSource(Source):
    """Each process's own data; the position counts rounds, with a batch of each process that still has one.

    Args:
        own: This process's part.
        shard: This process's number among the processes.
        ranks: The processes; in each round they exchange whether they have a batch.
        split: What `own` reads.

    Raises:
        DataError: Rank 0 has divided its data before its ranks were started.
    """

    is_split = True

    def __init__(self, own: Source, shard: Shard, ranks: Ranks, split: AlreadySplit) -> None:
        self.name = own.name
        self.shard = shard
        self.batch_size = own.batch_size
        self.knows_samples = own.knows_samples
        self._own = own
        self.loader = own.loader
        own.is_part = True
        self.ranks = ranks
        self._placeholder: Batch | None = None
        self.one_shot, self.made_ahead = own.one_shot, own.made_ahead
        for name in _OF_THE_PART:
            setattr(self, name, getattr(own, name))
        self._first = split.first
        asked = None if callable(split.data) else split.divided_for_one
        found = ranks.all_gather((own.exact, own.stateful, asked))
        self.exact = all(each[0] for each in found)
        self.stateful = any(each[1] for each in found)
        if found[0][2] is not None:
            raise DataError(
                f"the {self.name} data was given as already split, but the program had called {found[0][2]}"
                " before its ranks were started. It returned 1, so the program has not divided the data."
                " Divide it in __iter__ or in train_data() of a data object, or start the program with"
                " `drivetrain launch` or torchrun: then the number is right from the first line"
            )
        self._take_length()

    def _take_length(self) -> None:
        """Take the length of the longest part, if all are known."""
        counts = self.ranks.all_gather(self._own.count())
        known = [each for each in counts if each is not None]
        self._rounds = max(known) if len(known) == len(counts) else None

    def begin(self, epoch: int, position: int, limit: int | None, following: LookAhead) -> None:
        """Ask for the parts' lengths and for this process's next batches; a limit counts rounds."""
        self._take_length()
        self._own.begin(epoch, self._own.start(epoch, position), limit, following)

    def batches(self, epoch: int, position: int) -> Iterator[SharedBatch]:
        """Yield this process's batches from a round on, then placeholders until all processes have ended."""
        own: Iterator[Any] = self._own.batches(epoch, self._own.start(epoch, position))
        if self.part_has_ended:  # whose state may be that of the next epoch's start
            own, self.part_has_ended = iter(()), False
        while True:
            batch, _, samples = next(own, (None, 0, 0))
            ended = batch is None
            has = not ended and batch is not BAD
            if samples is None:
                samples = batch_size(batch) if has else 0
            lacks = ended and self._placeholder is None
            going, total, unknown, lacking, having = self.ranks.total(
                [not ended, samples or 0, samples is None, lacks, has]
            )
            if not going:
                return
            if lacking and having:  # otherwise no process has a batch to lend, and no step is run
                self._borrow(batch if has else None)
            self._placeholder = batch if has else self._placeholder
            yield self._round(batch, samples, None if unknown else int(total))

    def _round(self, batch: Batch | None, samples: int | None, total: int | None) -> SharedBatch:
        """Return this process's part of a round, which is a placeholder if it has no further batch."""
        ended = batch is None
        lent = self._placeholder if ended else batch
        if lent is None or lent is BAD:
            return SharedBatch(BAD, 1, 0, ended, None, None)
        evidence = Evidence(None, None if ended else fingerprint(lent)) if self.needs_evidence else None
        self.needs_evidence = False
        return SharedBatch(lent, 1, None if ended else samples, ended, total, evidence)

    def _borrow(self, batch: Batch | None) -> None:
        """Use another process's batch as the placeholder if there is none yet; all processes call it."""
        mine = None if batch is None else (to_host(batch),)
        found = [each[0] for each in self.ranks.all_gather(mine) if each is not None]
        if self._placeholder is None:
            self._placeholder = found[0]

    def count(self, position: int = 0) -> int | None:
        """Return the number of rounds left, which is the number of batches left in the longest part."""
        return None if self._rounds is None else max(0, self._rounds - position)

    def description(self) -> dict[str, Any]:
        if self._first is None:
            return {"kind": "already split"}
        return {"kind": "divided by its shards", "the first sample": self._first}

    def gathered(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return, on rank 0, which writes them, the states of all parts, by rank."""
        return {_PARTS: self.ranks.gather_first(state) or []}

    def own_part(self, gathered: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return this process's value, if as many processes gathered it as there are now."""
        parts = [] if gathered is None else gathered.get(_PARTS, [])
        return parts[self.shard.rank] if len(parts) == self.shard.size else None


def is_divided_alike(source: Source, state: Any, position: int, has_ended: bool) -> bool:
    """Return whether a checkpoint's data was divided as this run's, so that its state can be loaded.

    Args:
        source: This run's data.
        state: The state of the checkpoint's data.
        position: The run's position in its epoch.
        has_ended: Whether the checkpoint's data had been read to the end of its epoch, or not at all.

    Raises:
        CheckpointError: It was not, and the data does not go on from the start of an epoch.
    """
    parts = state.get(_PARTS) if isinstance(state, dict) else None
    now = source.shard.size if source.is_split else None
    before = None if parts is None else len(parts)
    if before == now:
        return True
    texts = ["not divided" if each is None else f"divided over {each} ranks" for each in (before, now)]
    what = f"the checkpoint's {source.name} data was {texts[0]} and this run's is {texts[1]}"
    has_state = any(each is not None for each in ([state] if parts is None else parts))
    if position or (has_state and not has_ended):
        raise CheckpointError(
            f"{what}, so it is unknown which batches were used. Resume on the same number of ranks, from a"
            " checkpoint at the end of an epoch that was not cut short, or begin the data at its start:"
            " fit(..., new_data=True)"
        )
    if has_state and source.shard.rank == 0:
        _LOG.info(f"{what}. The data begins this epoch at its start; its state is not loaded")
    return False
