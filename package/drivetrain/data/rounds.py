"""How the batches of an epoch are read by several processes together.

A round is what all of them read at the same time: the next `size x batch_size` samples of the one global
order, in consecutive slices. So every number of processes sees the same epoch, and a position, which counts
samples of the global order, means the same to all. The last round may be short. Its samples are then dealt
out evenly; a process that gets none is given a stand-in, which is run for a share of zero, because all have
to go through every step together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from drivetrain.data.outline import Outline
from drivetrain.data.share import Share
from drivetrain.types import Batch


class Slice(NamedTuple):
    """One process's part of a round.

    Attributes:
        start: The position of its first sample.
        items: Its samples' indices, or its batch; None once they are held elsewhere.
        advance: By how much the whole round moves the position.
        stand_in: Whether it is another process's.
        samples: How many samples the round has, if that is known.
        whole: The items of the whole round; None once they are held elsewhere.
    """

    start: int
    items: Any
    advance: int
    stand_in: bool
    samples: int | None
    whole: Sequence[Any] | None = None


class SharedBatch(NamedTuple):
    """A batch of one process's part of a round, on the host; see `Slice`.

    Attributes:
        batch: The batch.
        advance: By how much the whole round moves the position.
        samples: Its number of samples when the source knows it.
        stand_in: Whether it is another process's.
        everywhere: How many samples the round has, if that is known.
        evidence: What the round shows of the data, if that was asked for.
    """

    batch: Batch
    advance: int
    samples: int | None
    stand_in: bool
    everywhere: int | None
    evidence: Evidence | None = None


class Evidence(NamedTuple):
    """What the first round that a process reads shows of the data, to be compared with the others'.

    Attributes:
        order: The first indices, for a message, and a checksum of all of the round's; None without indices.
        contents: What samples or batches of it hold; None where that cannot be said.
    """

    order: tuple[str, int] | None
    contents: Outline | None


def sliced(
    take: Callable[[int, int], Sequence[Any]], position: int, size: int, drop_last: bool, share: Share
) -> Iterator[Slice]:
    """One process's slices of an order, from a position on.

    Args:
        take: Gives the indices from a position up to another, fewer where the order ends.
        position: Where to begin.
        size: Samples of a process's batch.
        drop_last: Whether a batch of fewer samples is left out.
        share: Whose slices.
    """
    whole = size * share.size
    while True:
        indices = take(position, position + whole)
        count = len(indices)
        if drop_last:
            count -= count % size
        if not count:
            return
        if count == whole or drop_last:
            low, high = share.rank * size, (share.rank + 1) * size
        else:
            each, more = divmod(count, share.size)
            low = share.rank * each + min(share.rank, more)
            high = low + each + (share.rank < more)
        stand_in = low >= count or low == high
        if stand_in:
            # One sample is enough, but who drops short batches may do so because a step cannot take them.
            low, high = 0, size if drop_last else 1
        yield Slice(position + low, indices[low:high], count, stand_in, count, indices)
        if count < whole:
            return
        position += count


def drawn(items: Iterator[Any]) -> Callable[[int, int], Sequence[Any]]:
    """What `sliced` takes from, for an order that can only be drawn one after the other."""
    return lambda start, stop: list(islice(items, stop - start))


def grouped(batches: Iterable[tuple[int, Sequence[Any]]], share: Share) -> Iterator[Slice]:
    """One process's batches of rounds that have a whole batch for each process.

    Args:
        batches: Where each begins, and its samples' indices.
        share: Whose batches.
    """
    iterator = iter(batches)
    while together := list(islice(iterator, share.size)):
        stand_in = share.rank >= len(together)
        start, items = together[0 if stand_in else share.rank]
        whole = [each for _, each in together]
        samples = sum(map(len, whole))
        yield Slice(start, items, samples, stand_in, samples, whole)


def rounds(batches: int, share: Share) -> int:
    """In how many rounds a number of batches is read."""
    return -(-batches // share.size)
