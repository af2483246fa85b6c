"""Data that the processes have divided among themselves: each reads its own, all in as many rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain.data.bad import BAD
from drivetrain.data.batch import batch_size, to_host
from drivetrain.data.outline import outline
from drivetrain.data.rounds import Evidence, SharedBatch
from drivetrain.data.share import Share
from drivetrain.data.sources import Source
from drivetrain.data.workers import Following
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import CheckpointError
from drivetrain.types import Batch

_DIVIDED = "of_each_rank"
"""In a checkpoint, what the states of divided data stand under."""


@dataclass(frozen=True)
class AlreadySplit:
    """See `already_split`.

    Attributes:
        data: This process's part.
    """

    data: Any

    @property
    def batch_size(self) -> Any:
        """The part's own, if it has one."""
        return getattr(self.data, "batch_size", None)


def already_split(data: Any) -> AlreadySplit:
    """Data of which each process has a part of its own, to be read by it alone and not divided once more.

    For data that was divided by rank before: shards of a stream (WebDataset's `split_by_node`), a sampler
    that gives every rank its own indices, files of each machine. Parts may be of different length: an epoch
    ends with the longest, and a rank that has no more batches takes part in the steps without weight.

    Its position in a checkpoint is the number of batches that each process has used, and the state of each
    process's iterable where it has one. So in the middle of an epoch it is resumed on as many processes. On
    one process it is read like any other data.

    Args:
        data: A DataLoader, a Dataset, a list of batches, any other iterable of batches, or a mapping of named
            ones for an evaluation.
    """
    return AlreadySplit(data)


class SplitSource(Source):
    """What each process reads of its own; the position counts rounds, of a batch of each that still has one.

    Args:
        own: This process's.
        share: Which of the processes this is.
        ranks: The processes; in each round they tell one another whether they have a batch.
    """

    apart = True

    def __init__(self, own: Source, share: Share, ranks: Ranks) -> None:
        self.name = own.name
        self.share = share
        self.batch_size = own.batch_size
        self._own = own
        self.ranks = ranks
        self._stand_in: Batch | None = None
        found = ranks.all_gather((own.count(), own.exact, own.stateful))
        counts = [count for count, _, _ in found if count is not None]
        self._rounds = max(counts) if len(counts) == len(found) else None
        self.exact = all(exact for _, exact, _ in found)
        self.stateful = any(stateful for _, _, stateful in found)

    def begin(self, epoch: int, position: int, limit: int | None, following: Following) -> None:
        """Have this process's next batches made; a limit counts rounds, each of one of them."""
        self._own.begin(epoch, self._own.start(epoch, position), limit, following)

    def leave_out_bad(self) -> None:
        """If this process's part allows it."""
        self._own.leave_out_bad()

    def waiting(self, epoch: int, number: int) -> str:
        """Of this process's part."""
        return self._own.waiting(epoch, number)

    @property
    def advice(self) -> str:
        """That of this process's part."""
        return self._own.advice

    def close(self) -> None:
        """End what makes them."""
        self._own.close()

    def batches(self, epoch: int, position: int) -> Iterator[SharedBatch]:
        """This process's batches from a round on, and stand-ins until all have come to their end."""
        own: Iterator[Any] = self._own.batches(epoch, self._own.start(epoch, position))
        while True:
            batch, _, samples = next(own, (None, 0, 0))
            ended = batch is None
            if batch is BAD:
                samples = 0
            samples = batch_size(batch) if samples is None else samples
            lacks = ended and self._stand_in is None
            has = not ended and batch is not BAD
            going, total, unknown, lacking, having = self.ranks.total(
                [not ended, samples or 0, samples is None, lacks, has]
            )
            if not going:
                return
            if lacking and having:  # else nobody has one to lend, and nothing is run
                self._borrow(None if batch is BAD else batch)
            if batch is BAD:
                yield SharedBatch(batch, 1, 0, False, None, None)
                continue
            if ended and self._stand_in is None:
                yield SharedBatch(BAD, 1, 0, True, None, None)
                continue
            if ended:
                batch = self._stand_in
            else:
                self._stand_in = batch
            evidence = Evidence(None, None if ended else outline(batch)) if self.shows else None
            self.shows = False
            yield SharedBatch(
                batch, 1, None if ended else samples, ended, None if unknown else int(total), evidence
            )

    def _borrow(self, batch: Batch | None) -> None:
        """Take another process's batch to stand in, where there was none yet; all call it together."""
        mine = None if batch is None else (to_host(batch),)
        found = [each[0] for each in self.ranks.all_gather(mine) if each is not None]
        if self._stand_in is None:
            self._stand_in = found[0]

    def count(self, position: int = 0) -> int | None:
        """The rounds that are left, which are as many as the longest part has batches."""
        return None if self._rounds is None else max(0, self._rounds - position)

    def description(self) -> dict[str, Any]:
        """That it is divided; its parts may differ."""
        return {"kind": "already split"}

    def snapshot(self) -> dict[str, Any] | None:
        """This process's part's own state."""
        return self._own.snapshot()

    def gathered(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The states of all parts, by rank."""
        return {_DIVIDED: self.ranks.all_gather(state)}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Hand this process's part its own state."""
        if state is not None and len(state[_DIVIDED]) == self.share.size:
            self._own.restore(state[_DIVIDED][self.share.rank])


def check_division(source: Source, state: Any, position: int) -> None:
    """See that a checkpoint's data was divided as this run's is, where that tells what was used of it.

    Args:
        source: This run's.
        state: What `gathered` gave the checkpoint.
        position: Where in its epoch that stands.

    Raises:
        CheckpointError: It was not.
    """
    parts = state[_DIVIDED] if isinstance(state, dict) and _DIVIDED in state else None
    now = source.share.size if source.apart else None
    before = None if parts is None else len(parts)
    if before == now or not (position or any(each is not None for each in parts or [])):
        return
    texts = [
        "not already split" if each is None else f"already split over {each} ranks" for each in (before, now)
    ]
    raise CheckpointError(
        f"the checkpoint's {source.name} data was {texts[0]} and this run's is {texts[1]}, so what was used"
        " of it cannot be told. Resume on as many ranks, or from a checkpoint at the end of an epoch"
    )
