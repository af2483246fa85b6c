"""Index batches that carry their own random stream, and how one is made into a batch in any process."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import queues
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert, get_worker_info

from drivetrain.data.bad import Raised
from drivetrain.data.outline import Outline, alike, outline
from drivetrain.data.rounds import Slice
from drivetrain.data.worker_signals import Spared
from drivetrain.distributed.children import end_with
from drivetrain.streams import HostDraws, seed_host


class IndexBatch(list[Any]):
    """The indices of one batch; a list, so that any dataset can read it, that travels to workers with its
    place.

    Attributes:
        epoch: The epoch that it belongs to.
        start: The position of its first sample in the epoch's order.
        seed: The seed of its random stream, a function of (seed, epoch, start).
        slice: What of a round it is, where several processes read the data; else None.
        probe: A seed, the same in all processes, and indices whose samples are to be outlined; else None.
    """

    epoch: int = 0
    start: int = 0
    seed: int = 0
    slice: Slice | None = None
    probe: tuple[int, list[Any]] | None = None


class KeyedDataset:
    """A dataset whose batches are made under the random stream of their key, in whichever process.

    Args:
        dataset: The user's.
        draws: Whether making a batch may draw from the host's generators.
        many: Whether samples may be asked for together, by `__getitems__` where the dataset has it.

    Attributes:
        before: Where the host's generators stood when the last batch was begun, when that is noted.
        outlined: What the samples of the last batch's probe hold; None where that cannot be said.
        in_worker: Set where batches are made by workers, which send what was raised in a batch's place.
    """

    def __init__(self, dataset: Any, draws: bool, many: bool) -> None:
        self.dataset = dataset
        self.before: HostDraws | None = None
        self.outlined: Outline | None = None
        self.in_worker = False
        self._draws = draws
        self._many = getattr(dataset, "__getitems__", None) if many else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: IndexBatch) -> Any:
        """The samples of a batch, drawn under its own random stream.

        Raises:
            RuntimeError: The dataset raised StopIteration, which would otherwise end the batch, or the epoch,
                without a word.
        """
        self.outlined = None if indices.probe is None else self._outlined(*indices.probe)
        if self._draws:
            seed_host(indices.seed)
            self.before = HostDraws() if self.in_worker else None
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

    def _outlined(self, seed: int, indices: list[Any]) -> Outline | None:
        """What samples hold, if that is a function of their index and of the host's generators: they are
        made twice.
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
            except Exception:  # one of the processes makes its batch of them, and raises it with their place
                return None
            made.append(outline(samples))
        return made[0] if alike(*made) else None


def may_draw(dataset: Any, collate: Any) -> bool:
    """Whether making a batch may draw from the host's generators: not where all code that runs is torch's.

    Seeding them for each batch would cost as much as the rest of our step.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    ours = collate is default_collate or collate is default_convert
    return not (ours and type(dataset) in (TensorDataset, torch.Tensor, list, tuple, range))


class WithDraws:
    """Collation in a worker: the batch, where the host's generators stand if making it drew from them, and
    what was asked of its samples.
    """

    def __init__(self, dataset: KeyedDataset, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset  # the worker's own, which it notes in what it began with
        self.dataset.in_worker = True
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Any, HostDraws | None, Outline | None] | Raised:
        if type(samples) is Raised:
            return samples
        try:
            batch = self.collate(samples)
        except Exception as error:
            return Raised(error)
        before = self.dataset.before
        return batch, None if before is None else before.if_moved(), self.dataset.outlined


class OnlyItem:
    """Collation for datasets that give ready batches: the only item, converted as the user's loader would."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, items: Sequence[Any]) -> Any:
        return self.convert(items[0])


def _cannot_send(error: BaseException, batch: object) -> None:
    """End a worker whose batch cannot be sent."""
    traceback.print_exception(error)
    print("drivetrain: a worker could not send its batch, and ends", file=sys.stderr, flush=True)
    os._exit(1)


class WorkerStart:
    """What a worker does first: is spared the signals that its run ends in order by; has itself ended
    with its parent, however that ends, which a worker that is stuck would not notice; makes
    `get_worker_info().dataset` the user's own dataset, as it is without us; then calls the user's
    `worker_init_fn`.

    To be made where the workers are started.

    Args:
        then: The user's.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = Spared(then)
        # The system goes by the thread that has started a process.
        is_main = threading.current_thread() is threading.main_thread()
        self.parent = os.getpid() if is_main else None

    def __call__(self, worker: int) -> None:
        if self.parent is not None:
            end_with(self.parent)
        # Of this process alone. Without it a batch that cannot be pickled, or for which there is no shared
        # memory, is told of on standard error and then waited for without an end.
        queues.Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        self.then(worker)
