"""Sources that are read pass by pass, and datasets whose order is a part of what they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from drivetrain.core.errors import DataError
from drivetrain.core.random_streams import ORDER, mix


class Passes:
    """The orders of several sources: each gives every sample once, and then begins anew in another order.

    Args:
        sizes: The number of samples of each source.
        seed: What the orders depend on.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes = sizes
        self._seed = seed
        self._orders: dict[int, tuple[int, Any]] = {}

    def index(self, source: int, drawn: int) -> int:
        """Return the index of the sample that a source gives after `drawn` others."""
        times, index = divmod(drawn, self._sizes[source])
        if self._orders.get(source, (-1,))[0] != times:
            generator = torch.Generator().manual_seed(mix(ORDER, self._seed, source, times))
            self._orders[source] = times, torch.randperm(self._sizes[source], generator=generator).numpy()
        return int(self._orders[source][1][index])


class OrderedByItself(ABC):
    """A dataset of several sources for training, which brings its order.

    Attributes:
        kind: What it is, for messages.
        names: Its sources.
    """

    kind: str
    names: list[str]

    @abstractmethod
    def order_settings(self) -> str:
        """Return what the order depends on beside the seed."""

    @abstractmethod
    def sampler(self, seed: int) -> Sampler[Any]:
        """Return the order of the samples."""

    def sampler_for(self, loader: DataLoader[Any], name: str, seed: int, is_training: bool) -> Sampler[Any]:
        """Return the order of the samples in a loader.

        Raises:
            DataError: The loader has another order, or is not for training.
        """
        if not is_training:
            raise DataError(
                f"the {name} data is a {self.kind} of sources, and only training takes one. Give the sources"
                f" by name: {{{', '.join(f'{each!r}: ...' for each in self.names)}}}"
            )
        for own, ours in (
            (loader.batch_sampler, (BatchSampler, type(None))),
            (loader.sampler, (SequentialSampler, RandomSampler)),
        ):
            if type(own) not in ours:
                raise DataError(
                    f"the {name} data is a {self.kind} of sources, which has its own order, but its loader"
                    f" has a {type(own).__name__}. Leave out the sampler, or group_by_length"
                )
        return self.sampler(seed)


def check_source(name: str, source: Any, kind: str) -> None:
    """Check that a source can give samples to a mixture or a combination.

    Raises:
        DataError: It gives batches or no samples, or has an order that would be lost.
    """
    what = f"the source {name!r} of the {kind} is a {type(source).__name__}"
    if isinstance(source, DataLoader):
        raise DataError(f"{what}. Give its dataset; the Trainer's batch_size and num_workers are for all")
    if isinstance(source, OrderedByItself):
        raise DataError(f"{what}, whose order would be lost. Give the sources of that {source.kind} instead")
    has_samples = hasattr(source, "__getitem__") or hasattr(source, "__iter__")
    if isinstance(source, (str, Mapping)) or not has_samples:
        raise DataError(f"{what}. Give a dataset with a length and an index, or a stream of samples")


def refuse_wrapped(dataset: Any, name: str) -> None:
    """Refuse a dataset that holds one with its own order, which would be lost.

    Raises:
        DataError: It does.
    """
    inner = dataset.datasets if isinstance(dataset, ConcatDataset) else [getattr(dataset, "dataset", None)]
    for each in inner:
        if isinstance(each, OrderedByItself):
            raise DataError(
                f"the {name} data is a {type(dataset).__name__} of a {each.kind} of sources, whose order"
                f" would be lost. Give the {each.kind} itself, made of parts of its sources"
            )
