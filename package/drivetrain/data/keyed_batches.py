"""Index batches with their own random stream, and how any process makes one into a batch."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import queues
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert, get_worker_info

from drivetrain.core.random_streams import HostDraws, peek, seed_host
from drivetrain.data.fingerprint import Fingerprint, fingerprint, matches
from drivetrain.data.rank_rounds import Slice
from drivetrain.data.skipped_batches import Raised
from drivetrain.data.workers.signals import IgnoreSignals


class IndexBatch(list[Any]):
    """The indices of one batch, as a list that any dataset can read, with their position for the workers.

    Attributes:
        epoch: The epoch that it belongs to.
        start: The position of its first sample in the epoch's order.
        seed: The seed of its random stream, a function of (seed, epoch, start).
        slice: Its part of a round, if several processes read the data; otherwise None.
        probe: A seed that is the same in all processes, and indices of samples to fingerprint; or None.
    """

    epoch: int = 0
    start: int = 0
    seed: int = 0
    slice: Slice | None = None
    probe: tuple[int, list[Any]] | None = None


class KeyedDataset:
    """A dataset whose batches are made under their own random stream, in whichever process.

    Args:
        dataset: The user's dataset.
        draws: Whether making a batch may draw from the host's generators.
        many: Whether samples may be requested together, by the dataset's `__getitems__` if it has one.

    Attributes:
        unmoved: What `peek` returns in a worker if the last batch has drawn nothing.
        fingerprint: The fingerprint of the last batch's probe; None if it is not reproducible.
        in_worker: Set in workers, which send an exception in place of the batch.
    """

    def __init__(self, dataset: Any, draws: bool, many: bool) -> None:
        self.dataset = dataset
        self.unmoved: tuple[int, float] | None = None
        self.fingerprint: Fingerprint | None = None
        self.in_worker = False
        self._draws = draws
        self._many = getattr(dataset, "__getitems__", None) if many else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: IndexBatch) -> Any:
        """Return the samples of a batch, drawn under its own random stream.

        Raises:
            RuntimeError: The dataset raised StopIteration, which would otherwise silently end the batch or
                the epoch.
        """
        self.fingerprint = None if indices.probe is None else self._reproducible_fingerprint(*indices.probe)
        if self._draws:
            seed_host(indices.seed)
            if self.in_worker:
                self.unmoved = peek()
                seed_host(indices.seed)
        try:
            if self._many is not None:
                return self._many(list(indices))
            samples = list(map(self.dataset.__getitem__, indices))
            if len(samples) != len(indices):
                raise RuntimeError(f"the dataset raised StopIteration for index {indices[len(samples)]}")
            return samples
        except Exception as error:
            if self.in_worker:
                return Raised(error)
            raise

    def _reproducible_fingerprint(self, seed: int, indices: list[Any]) -> Fingerprint | None:
        """Return the samples' fingerprint, or None unless making them twice gives the same.

        Samples that are not a function of their index and the host's generators cannot be compared.
        """
        made = []
        for _ in range(2):
            if self._draws:
                seed_host(seed)
            try:
                samples = (
                    self._many(indices)
                    if self._many is not None
                    else list(map(self.dataset.__getitem__, indices))
                )
            except Exception:  # the process whose batch has these samples raises it, with their position
                return None
            made.append(fingerprint(samples))
        return made[0] if matches(*made) else None


def may_draw(dataset: Any, collate: Any) -> bool:
    """Return whether making a batch may draw from the host's generators; False if all code is torch's.

    Seeding them for each batch would cost as much as the rest of our step.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    ours = collate is default_collate or collate is default_convert
    return not (ours and type(dataset) in (TensorDataset, torch.Tensor, list, tuple, range))


class WithDraws:
    """Collation in a worker, which adds the generators' state if it has moved, and the fingerprint."""

    def __init__(self, dataset: KeyedDataset, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset  # the worker's own copy, which holds `unmoved`
        self.dataset.in_worker = True
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Any, HostDraws | None, Fingerprint | None] | Raised:
        if type(samples) is Raised:
            return samples
        try:
            batch = self.collate(samples)
        except Exception as error:
            return Raised(error)
        unmoved = self.dataset.unmoved
        draws = None if unmoved is None or peek() == unmoved else HostDraws()
        return batch, draws, self.dataset.fingerprint


def single_item(convert: Callable[[Any], Any], items: Sequence[Any]) -> Any:
    """Collate for a dataset of ready batches: return the only item, converted as the user's loader would."""
    return convert(items[0])


def _cannot_send(error: BaseException, batch: object) -> None:
    """Exit a worker whose batch cannot be sent."""
    traceback.print_exception(error)
    print("drivetrain: a worker could not send its batch, and exits", file=sys.stderr, flush=True)
    os._exit(1)


class WorkerStart(IgnoreSignals):
    """A `worker_init_fn` that prepares a worker, then calls the user's.

    The worker ignores the signals that end its run in order. It is killed when its parent has died, which a
    stuck worker would not notice. `get_worker_info().dataset` is the user's own dataset.

    Make it in the process and thread that start the workers.
    """

    def __call__(self, worker: int) -> None:
        # In this process alone. Otherwise a batch that cannot be pickled, or for which there is no shared
        # memory, is reported on standard error and then waited for without end.
        queues.Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the class is frozen
        super().__call__(worker)
