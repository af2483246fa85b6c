"""Batches of an iterable dataset's samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from drivetrain.core.types import Batch
from drivetrain.data.protocols import has_state


class SampleStream:
    """Batches of the samples that an iterable dataset gives, without workers.

    It has the state of the dataset, if the dataset has one: each state is that between two batches. Its
    samples are then not drawn again after a resume, as a `DataLoader` over the dataset would.

    Args:
        dataset: The dataset. Its `set_epoch` is called before each epoch.
        batch_size: Samples of a batch; the last one may be shorter.
        collate: Makes a batch of a list of samples; None takes torch's default.

    Attributes:
        goes_on: Whether the iterator of the dataset returns itself, and can be read on after an error.
    """

    def __init__(
        self, dataset: Any, batch_size: int, collate: Callable[[list[Any]], Batch] | None = None
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.goes_on = False
        self._collate = collate or default_collate
        if has_state(dataset):
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)  # a TypeError if it has no length

    def __iter__(self) -> Iterator[Batch]:
        # A generator, because `islice` calls `iter` for each batch, which would begin some datasets anew:
        # those that return themselves, such as litData's. It is at its end once it has raised.
        samples = iter(self.dataset) if self.goes_on else (each for each in self.dataset)
        # `map` goes on after an error of the collate function.
        return map(self._collate, iter(lambda: list(islice(samples, self.batch_size)), []))
