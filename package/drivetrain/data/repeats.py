"""Samples that several workers of one stream give, because they do not divide it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.core.containers import leaves
from drivetrain.core.messages import logger
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size

_LOG = logger(__name__)

_BATCHES = 1024
_SAMPLES = 1 << 16
"""The most that are compared in a run; their checksums take up to 10 MB."""

_COLUMNS = 16
_LEAVES = 4


class Repeats:
    """The samples of a run's first batches, by the worker that gave them, in any order.

    Args:
        name: The data's name.
        workers: The number of workers, which give batches in turn.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._name, self._workers = name, workers
        self._batches = self._again = 0
        self._seen: set[tuple[int, int]] = set()

    def note(self, batch: Batch) -> bool:
        """Note the samples of the next batch, and return whether those of further batches are of use."""
        worker = self._batches % self._workers
        for each in _checksums(batch):
            self._again += (worker, each) in self._seen
            self._seen.add((worker, each))
        self._batches += 1
        is_enough = self._batches == _BATCHES or len(self._seen) >= _SAMPLES
        looks = is_enough or (self._batches >= 8 and self._batches & (self._batches - 1) == 0)
        return not (looks and self.check(at_end=False)) and not is_enough

    def check(self, at_end: bool) -> bool:
        """Warn if several workers gave the same samples; return whether they did.

        Samples that repeat within a worker, such as small numbers, are no sign: chance repeats them in one
        worker as often as in two.

        Args:
            at_end: Whether the workers have given all, so that a few are enough.
        """
        different = len({each for _, each in self._seen})
        shared = len(self._seen) - different
        if shared < max(2 if at_end else 8, 0.05 * different, 10 * self._again):
            return False
        _LOG.warning(
            f"the {self._name} data gives the same samples in several of its {self._workers} workers:"
            f" {shared} of {len(self._seen)} compared samples had come from another worker."
            " Each worker reads a copy of the whole stream. Divide it in __iter__ by"
            " torch.utils.data.get_worker_info(), or use num_workers=1"
        )
        return True


def _checksums(batch: Batch) -> Iterator[int]:
    """Yield a checksum of each sample, of a few of its numbers; none without tensors on the host."""
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
