"""The order of a dataset's indices: a function of (seed, epoch), whatever ran before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from drivetrain.core.errors import DataError
from drivetrain.core.random_streams import ORDER, host_state, load_host_state, mix, preserved, seed_host
from drivetrain.data.length_grouped import LengthGroupedSampler

_PIECE = 10_000
"""Indices drawn from a sampler at a time: entering and leaving its random stream takes 0.2 ms."""


class Order:
    """The order of a dataset's indices in each epoch.

    Args:
        name: The data's name, for messages.
        sampler: The user's sampler. torch's sequential and shuffling samplers are replaced by functions of
            (seed, epoch). Any other is run once an epoch under a random stream of (seed, epoch), which also
            seeds its generator.
        size: The number of samples in the dataset.
        seed: The run's seed.

    Attributes:
        sampler: The user's sampler.
        known: Whether it is one of torch's two or ours, whose length is exact.
    """

    def __init__(self, name: str, sampler: Iterable[Any], size: int, seed: int) -> None:
        self._name = name
        self._seed = seed
        self.sampler = sampler
        self._size = size
        self._sequential = type(sampler) is SequentialSampler and len(sampler) == size
        self._shuffled = (
            type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
        )
        grouped = type(sampler) is LengthGroupedSampler and len(sampler) == size
        self.known = self._sequential or self._shuffled or grouped
        self._epoch = -1
        self._indices: Any = range(size)

    def indices(self, epoch: int) -> Any:
        """Return all indices of an epoch as a range, tensor or list; for a sampler with a length."""
        if not self._sequential and epoch != self._epoch:
            self._indices = self._permutation(epoch) if self._shuffled else self.replayed(self.sampler, epoch)
            self._epoch = epoch
        return self._indices

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix(ORDER, self._seed, epoch))
        return torch.randperm(self._size, generator=generator)

    def replayed(self, sampler: Iterable[Any], epoch: int) -> Iterable[Any]:
        """Run a user's sampler for an epoch; every call gives the same.

        Returns:
            A list. For a sampler without a length, which may be endless, an iterator that draws as it goes.

        Raises:
            DataError: The sampler raised.
        """
        drawn = self.drawn(sampler, epoch)
        return drawn if _length(sampler) is None else list(drawn)

    def drawn(self, sampler: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Yield the indices of a user's sampler for an epoch, drawn in pieces from a separate random stream.

        Raises:
            DataError: The sampler raised.
        """
        iterator: Iterator[Any] | None = None
        stream: tuple[torch.Tensor, dict[str, Any]] | None = None
        while True:
            # A resumed run asks again in the middle of an epoch, which must not move the step's streams.
            with preserved():
                if stream is not None:
                    torch.default_generator.set_state(stream[0])
                    load_host_state(stream[1])
                try:
                    iterator = self._begun(sampler, epoch) if iterator is None else iterator
                    piece = list(islice(iterator, _PIECE))
                except Exception as error:
                    raise DataError(
                        f"the {self._name} data's sampler ({type(sampler).__name__}) raised in epoch"
                        f" {epoch}: {type(error).__name__}: {error}"
                    ) from error
                stream = torch.default_generator.get_state(), host_state()
            yield from piece
            if len(piece) < _PIECE:
                return

    def _begun(self, sampler: Iterable[Any], epoch: int) -> Iterator[Any]:
        value = mix(ORDER, self._seed, epoch)
        for owner in (sampler, getattr(sampler, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(value)
        seed_host(value)
        return iter(sampler)

    def length(self) -> int | None:
        """Return the number of indices in an epoch, without drawing it; None if the sampler does not say."""
        return self._size if self.known else _length(self.sampler)


def unshuffled(sampler: Iterable[Any]) -> Iterable[Any]:
    """Return a sampler of the same samples in the dataset's order, if the sampler only shuffles.

    One that draws which samples it gives is returned unchanged, and so is one of the user's own class.
    """
    kind = type(sampler)
    if isinstance(sampler, RandomSampler) and kind.__iter__ is RandomSampler.__iter__:
        size = len(sampler.data_source)
        whole = not sampler.replacement and sampler.num_samples == size
        return SequentialSampler(sampler.data_source) if whole else sampler
    if kind is LengthGroupedSampler:
        return range(len(sampler))  # type: ignore[arg-type]
    if isinstance(sampler, SubsetRandomSampler) and kind.__iter__ is SubsetRandomSampler.__iter__:
        return sorted(int(index) for index in sampler.indices)
    return sampler


def undivided(sampler: Iterable[Any], name: str) -> Iterable[Any]:
    """Replace torch's DistributedSampler by a sampler of the whole dataset, which is divided here.

    Raises:
        DataError: A sampler of another kind divides the dataset.
    """
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        whole: Any = sampler.dataset
        return RandomSampler(whole) if sampler.shuffle else SequentialSampler(whole)
    refuse_divided(sampler, name)
    return sampler


def refuse_divided(sampler: Any, name: str) -> None:
    """Refuse a sampler that divides the dataset: dividing its part again would leave out samples.

    Raises:
        DataError: The sampler, or the one that it draws from, gives each of several processes a part.
    """
    for owner in (sampler, getattr(sampler, "sampler", None)):
        parts = getattr(owner, "num_replicas", None)
        if isinstance(parts, int) and parts > 1:
            raise DataError(
                f"the {name} data's sampler ({type(owner).__name__}) divides the dataset into {parts} parts,"
                " and each process would divide its part again. Make it with num_replicas=1 and rank=0, so"
                " that it gives all samples, give a sampler of the whole dataset, or pass"
                " drivetrain.already_split(loader)"
            )


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None
