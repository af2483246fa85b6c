"""Read the batches of an epoch in several processes together.

A global micro-batch is what all of them read at the same time: the next `size x batch_size` samples of the
one global order, in consecutive slices. Names here call it a round. So every number of processes sees the
same epoch, and a position, which counts samples of the global order, has the same meaning for all. The last
round may be short. Its samples are then distributed evenly. A process without samples gets a placeholder,
which it runs with weight zero, because all processes must take part in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from drivetrain.core.types import Batch
from drivetrain.data.fingerprint import Fingerprint
from drivetrain.data.shard import Shard


class Slice(NamedTuple):
    """One process's part of a round.

    Attributes:
        start: The position of its first sample.
        items: Its samples' indices, or its batch; None in a worker's index batch.
        advance: How far the whole round moves the position.
        is_placeholder: Whether it is a placeholder, another process's part.
        samples: The number of samples in the round, if that is known.
        whole: The items of the whole round; None in a worker's index batch.
    """

    start: int
    items: Any
    advance: int
    is_placeholder: bool
    samples: int | None
    whole: Sequence[Any] | None = None


class SharedBatch(NamedTuple):
    """A batch of one process's part of a round, on the host; see `Slice`.

    Attributes:
        batch: The batch.
        advance: How far the whole round moves the position.
        samples: Its number of samples, if the source knows it.
        is_placeholder: Whether it is a placeholder, another process's batch.
        total: The number of samples in the round, if that is known.
        evidence: The round's evidence, if it was asked for.
    """

    batch: Batch
    advance: int
    samples: int | None
    is_placeholder: bool
    total: int | None
    evidence: Evidence | None = None


class Evidence(NamedTuple):
    """Evidence from a process's first round, to compare its data with the other processes'.

    Attributes:
        order: The first indices, for a message, and a checksum of all of the round's; None without indices.
        contents: The fingerprint of some samples or batches; None if it is not reproducible.
    """

    order: tuple[str, int] | None
    contents: Fingerprint | None


def sliced(
    take: Callable[[int, int], Sequence[Any]],
    position: int,
    sizes: Iterable[int],
    drop_last: bool,
    shard: Shard,
) -> Iterator[Slice]:
    """Yield one process's slices of an order, from a position on.

    Args:
        take: Returns the indices between two positions, fewer if the order ends.
        sizes: The number of samples of a process's batch, for each round; enough for the whole order.
    """
    for size in sizes:
        whole = size * shard.size
        indices = take(position, position + whole)
        count = len(indices)
        if drop_last:
            count -= count % size
        if not count:
            return
        if count == whole or drop_last:
            low, high = shard.rank * size, (shard.rank + 1) * size
        else:
            each, more = divmod(count, shard.size)
            low = shard.rank * each + min(shard.rank, more)
            high = low + each + (shard.rank < more)
        is_placeholder = low >= count or low == high
        if is_placeholder:
            # One sample is enough, but with drop_last a step may not be able to take a short batch.
            low, high = 0, size if drop_last else 1
        yield Slice(position + low, indices[low:high], count, is_placeholder, count, indices)
        if count < whole:
            return
        position += count


def drawn(items: Iterator[Any]) -> Callable[[int, int], Sequence[Any]]:
    """Return a `take` for `sliced`, for an order that can only be drawn from front to back."""
    return lambda start, stop: list(islice(items, stop - start))


def grouped(batches: Iterable[tuple[int, Sequence[Any]]], shard: Shard) -> Iterator[Slice]:
    """Yield one process's batches of rounds with a whole batch for each process."""
    iterator = iter(batches)
    while together := list(islice(iterator, shard.size)):
        is_placeholder = shard.rank >= len(together)
        start, items = together[0 if is_placeholder else shard.rank]
        whole = [each for _, each in together]
        samples = sum(map(len, whole))
        yield Slice(start, items, samples, is_placeholder, samples, whole)


def rounds(batches: int, shard: Shard) -> int:
    """Return the number of rounds for a number of batches."""
    return -(-batches // shard.size)
