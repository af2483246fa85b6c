"""The order of a dataset's indices: a function of (seed, epoch), whatever ran before."""

from __future__ import annotations

import copy
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from drivetrain.core.errors import DataError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import ORDER, host_state, load_host_state, mix, preserved, seed_host
from drivetrain.data.orders.length_grouped import LengthGroupedSampler
from drivetrain.data.orders.shuffle import LARGE, FormulaOrder
from drivetrain.data.protocols import has_state, length_of, set_epoch

_LOG = logger(__name__)

_PIECE = 10_000
"""Indices drawn from a sampler at a time: entering and leaving its random stream takes 0.2 ms."""

_INDICES = 100_000
"""The most indices of a subset that are compared, so that a save never takes long."""

SHUFFLED, FORMULA, OWN = "shuffled", "shuffled by a formula", "that of the program's sampler"
"""Kinds of orders."""


@dataclass
class _Drawn:
    """The order that a user's sampler has given last.

    Attributes:
        epoch: Its epoch.
        length: The sampler's length as it was drawn; None if it has none.
        states: The states of the sampler, and of the one that it draws from, before it was drawn.
        after: Those after that.
        indices: What it gave; the first piece of it, if the sampler has no length.
        rest: What comes after that piece; None for a sampler with a length.
        is_read: Whether the epoch was read.
    """

    epoch: int
    length: int | None
    states: list[Any]
    after: list[Any]
    indices: list[Any]
    rest: Iterator[Any] | None
    is_read: bool = False

    @cached_property
    def checksum(self) -> int:
        """A checksum of `indices`, whatever the sizes of its batches are."""
        listed: Any = self.indices
        if listed and isinstance(listed[0], (list, tuple)):
            listed = list(chain.from_iterable(listed))
        return checksum(listed)


def checksum(indices: Any) -> int:
    """Return a checksum of a sequence of indices, or of keys of another type."""
    try:
        return zlib.crc32(array("q", indices).tobytes())
    except (TypeError, OverflowError):
        texts = [each if isinstance(each, (int, float, str, bytes)) else str(type(each)) for each in indices]
        return zlib.crc32(repr(texts).encode())


def composition(dataset: Any) -> str:
    """Return a text that depends on the indices of torch's `Subset` and the lengths in a `ConcatDataset`.

    Of many indices some are compared. All other datasets give an empty text.
    """
    if isinstance(dataset, Subset):
        step = len(dataset.indices) // _INDICES + 1
        return f"{checksum(dataset.indices[::step])} of ({composition(dataset.dataset)})"
    if isinstance(dataset, ConcatDataset):
        return " + ".join(f"{len(each)} ({composition(each)})" for each in dataset.datasets)  # type: ignore[arg-type]
    return ""


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
        is_grouped: Whether it is ours, which groups all samples by length.
    """

    def __init__(self, name: str, sampler: Iterable[Any], size: int, seed: int) -> None:
        self._name = name
        self._seed = seed
        self.sampler: Any = sampler
        self._sequential = type(sampler) is SequentialSampler and len(sampler) == size
        self._shuffled = (
            type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
        )
        self.is_grouped = type(sampler) is LengthGroupedSampler and len(sampler) == size
        self.known = self._sequential or self._shuffled or self.is_grouped
        self._epoch = -1
        self._indices: Any = ()
        self._drawn: _Drawn | None = None
        self._length_told = False

    def indices(self, epoch: int) -> Any:
        """Return all indices of an epoch as a sequence that can be sliced; for a sampler with a length."""
        if self._sequential:
            return range(len(self.sampler))
        if epoch != self._epoch:
            # One with a `num_samples` that the dataset has outgrown draws which samples it gives.
            whole = self._shuffled and len(self.sampler) == len(self.sampler.data_source)
            self._indices = self._permutation(epoch) if whole else self.replayed(self.sampler, epoch)
            self._epoch = epoch
        return self._indices

    @property
    def kind(self) -> str:
        """The kind of the order, which is in a checkpoint because a position depends on it."""
        if self._shuffled:
            return FORMULA if len(self.sampler) > LARGE else SHUFFLED
        return "the dataset's" if self._sequential else "grouped" if self.is_grouped else OWN

    def _permutation(self, epoch: int) -> FormulaOrder | torch.Tensor:
        seed = mix(ORDER, self._seed, epoch)
        if self.kind == FORMULA:
            return FormulaOrder(len(self.sampler), seed)
        return torch.randperm(len(self.sampler), generator=torch.Generator().manual_seed(seed))

    def forget(self) -> None:
        """Draw every order anew: the dataset has another length."""
        self._epoch, self._drawn = -1, None

    def replayed(self, sampler: Iterable[Any], epoch: int) -> Iterable[Any]:
        """Return what a user's sampler gives in an epoch; it is drawn once an epoch.

        Returns:
            A list. For a sampler without a length, which may be endless, an iterator that draws as it goes.
        """
        found = self._drawn
        if found is None or found.epoch != epoch or (found.is_read and found.rest is not None):
            found = self._draw(sampler, epoch)
        found.is_read = True
        return found.indices if found.rest is None else chain(found.indices, found.rest)

    def _draw(self, sampler: Iterable[Any], epoch: int) -> _Drawn:
        states = _states(sampler)
        length = length_of(sampler)
        drawn, is_sized = self.drawn(sampler, epoch), length is not None
        first = list(drawn if is_sized else islice(drawn, _PIECE))
        if is_sized and len(first) != length and not self._length_told:
            self._length_told = True
            _LOG.warning(
                f"the {self._name} data's sampler ({type(sampler).__name__}) gave {len(first)} entries in"
                f" epoch {epoch}, and its length is {length}. The epoch ends after those that it gave;"
                " correct its __len__, which the schedule relies on"
            )
        self._drawn = _Drawn(epoch, length, states, _states(sampler), first, None if is_sized else drawn)
        return self._drawn

    def state(self) -> dict[str, Any] | None:
        """Return what a resumed run needs to draw the last order again; None if no sampler was drawn."""
        found = self._drawn
        if found is None:
            return None
        return {
            "epoch": found.epoch,
            "length": found.length,
            "checksum": found.checksum,
            "samplers": found.states,
            "after": found.after,
        }

    def restore(self, sampler: Iterable[Any], state: Mapping[str, Any], position: int) -> None:
        """Load a sampler's state and draw its last order again; warn if it gives another one.

        A sampler without a state is drawn until it gives the order, at most as often as before. So one that
        counts its epochs, or has a generator of its own, resumes too.
        """
        epoch, owners, length = state["epoch"], _owners(sampler), length_of(sampler)
        if not position and state.get("length", length) != length:  # the data may change between two epochs
            _load(owners, state["after"])
            return
        loaded = _load(owners, state["samplers"])
        for _ in range(1 if loaded else epoch + 1):
            if self._draw(sampler, epoch).checksum == state["checksum"]:
                return
        lost = (
            "Samples of this epoch are lost, and others come twice"
            if position
            else "Each sample comes once, but not in the order of a run that was not interrupted"
        )
        although = ", although its state was loaded" if loaded else ""
        _LOG.warning(
            f"the {self._name} data's sampler ({type(sampler).__name__}) gives another order for epoch"
            f" {epoch} than before the checkpoint{although}. {lost}, unless only the batches or the data have"
            " changed. Its order must depend on the epoch that set_epoch is given and on the global"
            " generators of torch, numpy and Python alone, or on what its state_dict holds"
        )

    def drawn(self, sampler: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Yield the indices of a user's sampler for an epoch, drawn in pieces from its own random stream."""
        iterator: Iterator[Any] | None = None
        stream: tuple[list[torch.Tensor], dict[str, Any]] | None = None
        own = generators_of(_owners(sampler))
        while True:
            # A resumed run asks again in the middle of an epoch, which must not move the step's streams. The
            # sampler's generators keep the seed that the user gave them; another fit reads it again.
            with preserved(others=own):
                if stream is not None:
                    for generator, state in zip((torch.default_generator, *own), stream[0], strict=True):
                        generator.set_state(state)
                    load_host_state(stream[1])
                try:
                    iterator = self._begun(sampler, epoch) if iterator is None else iterator
                    piece = list(islice(iterator, _PIECE))
                except Exception as error:
                    raise DataError(
                        f"the {self._name} data's sampler ({type(sampler).__name__}) raised in epoch"
                        f" {epoch}: {type(error).__name__}: {error}"
                    ) from error
                stream = [each.get_state() for each in (torch.default_generator, *own)], host_state()
            yield from piece
            if len(piece) < _PIECE:
                return

    def _begun(self, sampler: Iterable[Any], epoch: int) -> Iterator[Any]:
        value = mix(ORDER, self._seed, epoch)
        for owner in _owners(sampler):
            set_epoch(owner, epoch)
        for generator in generators_of(_owners(sampler)):
            generator.manual_seed(value)
        seed_host(value)
        return iter(sampler)

    def length(self) -> int | None:
        """Return the number of indices in an epoch that begins now, without drawing it; None if unknown."""
        return length_of(self.sampler)


def unshuffled(sampler: Iterable[Any]) -> Iterable[Any]:
    """Return a sampler of the same samples in the dataset's order, if the sampler only shuffles.

    A sampler that draws its samples, or is of the user's own class, is returned unchanged.
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
    """Replace torch's DistributedSampler by a sampler of the whole dataset, which is divided here."""
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        whole: Any = sampler.dataset
        return RandomSampler(whole) if sampler.shuffle else SequentialSampler(whole)
    refuse_divided(sampler, name)
    return sampler


def refuse_divided(sampler: Any, name: str) -> None:
    """Refuse a sampler that divides the dataset: dividing its part again would leave out samples."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        parts = getattr(owner, "num_replicas", None)
        if isinstance(parts, int) and parts > 1:
            raise DataError(
                f"the {name} data's sampler ({type(owner).__name__}) divides the dataset into {parts} parts,"
                " and each process would divide its part again. Make it with num_replicas=1 and rank=0, so"
                " that it gives all samples, give a sampler of the whole dataset, or pass"
                " drivetrain.already_split(loader)"
            )


def generators_of(owners: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that a user has given to a loader and its samplers, each once."""
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _owners(sampler: Any) -> tuple[Any, Any]:
    """Return a sampler and the one that it draws from, or None."""
    return sampler, getattr(sampler, "sampler", None)


def _states(sampler: Iterable[Any]) -> list[Any]:
    return [copy.deepcopy(each.state_dict()) if has_state(each) else None for each in _owners(sampler)]


def _load(owners: Iterable[Any], states: Iterable[Any]) -> bool:
    """Load the states of a sampler and of the one that it draws from; return whether there was any."""
    pairs = [each for each in zip(owners, states, strict=False) if each[1] is not None and has_state(each[0])]
    for owner, state in pairs:
        owner.load_state_dict(copy.deepcopy(state))
    return bool(pairs)
