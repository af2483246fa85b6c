"""In which order a dataset's indices come: a function of (seed, epoch), whatever ran before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from drivetrain.errors import DataError
from drivetrain.streams import ORDER, host_state, load_host_state, mix, preserved, seed_host

_PIECE = 10_000
"""Indices drawn from a sampler at a time: entering and leaving its random stream takes 0.2 ms."""


class Order:
    """The order of a dataset's indices in each epoch.

    Args:
        name: Whose data it is, for messages.
        sampler: The user's. torch's sequential and shuffling samplers are replaced by functions of (seed,
            epoch); any other is run once an epoch under a random stream of (seed, epoch), its own generator
            included.
        size: The number of samples in the dataset.
        seed: The run's seed.

    Attributes:
        sampler: The user's.
        known: Whether it is one of torch's two, whose length can be relied on.
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
        self.known = self._sequential or self._shuffled
        self._epoch = -1
        self._indices: Any = range(size)

    def indices(self, epoch: int) -> Any:
        """All indices of an epoch: a range, a tensor or a list; for a sampler that has a length."""
        if not self._sequential and epoch != self._epoch:
            self._indices = self._permutation(epoch) if self._shuffled else self.replayed(self.sampler, epoch)
            self._epoch = epoch
        return self._indices

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix(ORDER, self._seed, epoch))
        return torch.randperm(self._size, generator=generator)

    def replayed(self, sampler: Iterable[Any], epoch: int) -> Iterable[Any]:
        """Everything a user's sampler gives in an epoch; the same whenever it is asked.

        Returns:
            A list; of a sampler without a length, which may be endless, an iterator that draws as it goes.

        Raises:
            DataError: The sampler raised.
        """
        drawn = self.drawn(sampler, epoch)
        return drawn if _length(sampler) is None else list(drawn)

    def drawn(self, sampler: Iterable[Any], epoch: int) -> Iterator[Any]:
        """What a user's sampler gives in an epoch, drawn a piece at a time in a random stream of its own.

        Raises:
            DataError: The sampler raised.
        """
        iterator: Iterator[Any] | None = None
        stream: tuple[torch.Tensor, dict[str, Any]] | None = None
        while True:
            # A resumed run asks again in the middle of an epoch; the step's streams must not notice.
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
        """How many indices an epoch has, without drawing it; None when the sampler does not say."""
        return self._size if self.known else _length(self.sampler)


def unshuffled(sampler: Iterable[Any]) -> Iterable[Any]:
    """The same choice of samples in the dataset's order, as far as that can be told of a sampler; one of the
    user's own is left as it is.
    """
    if isinstance(sampler, RandomSampler):
        return SequentialSampler(sampler.data_source)
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(int(index) for index in sampler.indices)
    return sampler


def undivided(sampler: Iterable[Any], name: str) -> Iterable[Any]:
    """A sampler of the whole dataset in the place of torch's that divides it over processes, as we do that.

    Raises:
        DataError: It divides the dataset in a way of its own.
    """
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        whole: Any = sampler.dataset
        return RandomSampler(whole) if sampler.shuffle else SequentialSampler(whole)
    refuse_divided(sampler, name)
    return sampler


def refuse_divided(sampler: Any, name: str) -> None:
    """Stand against samples that nobody would see: what has been divided must not be divided once more.

    Raises:
        DataError: It, or the sampler that it draws from, gives one of several processes its part.
    """
    for owner in (sampler, getattr(sampler, "sampler", None)):
        parts = getattr(owner, "num_replicas", None)
        if isinstance(parts, int) and parts > 1:
            raise DataError(
                f"the {name} data's sampler ({type(owner).__name__}) divides the dataset into {parts} parts"
                " itself, and several processes would divide its part again. Make it with num_replicas=1 and"
                " rank=0, so that it gives all samples, give a sampler of the whole dataset, or pass"
                " drivetrain.already_split(loader)"
            )


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None
