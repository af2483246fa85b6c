"""Samples that several readers of one stream gave: workers that do not divide it, or ranks.

Two readers of the same samples need not give them in the same order, so first batches prove nothing. Each
reader keeps the checksums of its samples that are below a limit, and lowers the limit when it has many. Which
samples are kept depends on their checksums alone, so that every reader keeps the same ones in any order.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.containers import opened
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size

CHECKED_AT = (8, 32, 128, 512, 1024)
"""Numbers of batches after which readers are compared; after the last, nothing more is noted."""

_MOST = 1024
"""Checksums kept of a reader: 64 KiB of memory."""

_COLUMNS = 16
_LEAVES = 4


class Sketch(NamedTuple):
    """The samples kept of one reader.

    Attributes:
        limit: Checksums from here on are not kept.
        counts: How often each checksum came.
    """

    limit: int
    counts: Counter[int]


_EMPTY = Sketch(1 << 32, Counter())


class Repeats:
    """The samples of each reader of a stream, to find those that several of them gave."""

    def __init__(self) -> None:
        self._of: dict[int, Sketch] = {}

    @classmethod
    def joined(cls, sketches: Sequence[tuple[int, list[int], list[int]]]) -> Repeats:
        """Return the samples of several processes, each a reader."""
        joined = cls()
        for reader, (limit, checksums, counts) in enumerate(sketches):
            joined._of[reader] = Sketch(limit, Counter(dict(zip(checksums, counts, strict=True))))
        return joined

    def note(self, reader: int, batch: Batch) -> None:
        """Note the samples of a batch; a batch without tensors on the host is left out."""
        limit, counts = self._of.get(reader) or Sketch(_EMPTY.limit, Counter())
        counts.update(each for each in _checksums(batch) if each < limit)
        while len(counts) > _MOST:
            limit >>= 1
            counts = Counter({each: count for each, count in counts.items() if each < limit})
        self._of[reader] = Sketch(limit, counts)

    def sketch(self) -> tuple[int, list[int], list[int]]:
        """Return the samples of the only reader, for `joined`."""
        limit, counts = self._of.get(0) or _EMPTY
        return limit, list(counts), list(counts.values())

    def found(self, at_end: bool) -> tuple[int, int] | None:
        """Return how many of the samples that were compared came from several readers, and their number.

        None if there are few. Samples that repeat within a reader, such as small numbers, are no sign: chance
        repeats them in one reader as often as in two.

        Args:
            at_end: Whether the readers have given all, so that a few are enough.
        """
        if len(self._of) < 2:
            return None
        limit = min(each.limit for each in self._of.values())
        kept = [{key: n for key, n in each.counts.items() if key < limit} for each in self._of.values()]
        readers = Counter(key for each in kept for key in each)
        shared = sum(count > 1 for count in readers.values())
        within = sum(n - 1 for each in kept for n in each.values())
        if shared < (2 if at_end else 8) or shared < 0.05 * len(readers) or within > 0.1 * shared:
            return None
        return shared, len(readers)


def _checksums(batch: Batch) -> Iterator[int]:
    """Yield a checksum of each sample: of a few of its numbers."""
    count = batch_size(batch)
    tensors = (each for each in _tensors(batch) if each.ndim and each.shape[0] == count)
    columns = [_columns(each.detach(), count or 0) for each in islice(tensors, _LEAVES)]
    if columns:
        rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
        yield from map(zlib.crc32, rows)


def _columns(tensor: Tensor, count: int) -> Any:
    flat = tensor.reshape(count, -1)
    width = flat.shape[1]
    if width > _COLUMNS:
        flat = flat[:, torch.linspace(0, width - 1, _COLUMNS).long()]
    return flat.contiguous().view(torch.uint8).numpy()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.device.type == "cpu" and batch.layout is torch.strided and not batch.is_quantized:
            yield batch
    elif (container := opened(batch)) is not None:
        for each in container.entries:
            yield from _tensors(each)
