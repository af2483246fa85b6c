"""Samples that several readers of one stream gave: workers that do not divide it, or ranks.

Two readers of the same samples need not give them in the same order, so first batches prove nothing. Each
reader keeps the smallest checksums of its samples. Which samples are kept depends on the checksums alone, so
that every reader keeps the same ones in any order.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.containers import leaves
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size

CHECKED_AT = (8, 32, 128, 512, 1024)
"""Numbers of batches after which readers are compared; after the last, nothing more is noted."""

_MOST = 1024
"""Checksums compared of a reader; up to twice as many are kept, in 128 KiB of memory."""

_COLUMNS = 16
_LEAVES = 4


class Repeats:
    """The samples of each reader of a stream, to find those that several of them gave.

    Args:
        kept: For each reader, how often each checksum came.
    """

    def __init__(self, kept: Mapping[int, Counter[int]] | None = None) -> None:
        self.kept = dict(kept or {})

    def note(self, reader: int, batch: Batch) -> None:
        """Note the samples of a batch; a batch without tensors on the host is left out."""
        counts = self.kept.setdefault(reader, Counter())
        counts.update(_checksums(batch))
        if len(counts) > 2 * _MOST:  # seldom, because sorting takes longer than reading a batch
            for each in sorted(counts)[_MOST:]:
                del counts[each]

    def found(self, at_end: bool) -> tuple[int, int] | None:
        """Return how many of the samples that were compared came from several readers, and their number.

        None if there are few. Samples that repeat within a reader, such as small numbers, are no sign: chance
        repeats them in one reader as often as in two.

        Args:
            at_end: Whether the readers have given all, so that a few are enough.
        """
        if len(self.kept) < 2:
            return None
        # Of the smallest checksums none was left out; of those above, some may have been.
        limit = min(
            (sorted(each)[_MOST - 1] for each in self.kept.values() if len(each) >= _MOST), default=1 << 32
        )
        kept = [{key: n for key, n in each.items() if key <= limit} for each in self.kept.values()]
        readers = Counter(key for each in kept for key in each)
        shared = sum(count > 1 for count in readers.values())
        within = sum(n - 1 for each in kept for n in each.values())
        if shared < (2 if at_end else 8) or shared < 0.05 * len(readers) or within > 0.1 * shared:
            return None
        return shared, len(readers)


def _checksums(batch: Batch) -> Iterator[int]:
    """Yield a checksum of each sample: of a few of its numbers."""
    count = batch_size(batch)
    tensors = (each for each in leaves(batch) if _is_of_host(each) and each.shape[:1] == (count,))
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


def _is_of_host(value: Any) -> bool:
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
    return is_strided and value.device.type == "cpu"
