"""Several sources in each batch: so many samples of every one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from drivetrain.core.errors import ConfigError, DataError, nearest
from drivetrain.core.validation import count, one_of
from drivetrain.data.orders.passes import OrderedByItself, Passes, check_source


def combined(
    sources: Mapping[str, Any], *, samples: Mapping[str, int] | None = None, until: str = "longest"
) -> Combined:
    """Combine datasets, so that each batch is a mapping of their names to a batch from each dataset.

    Each source is shuffled by itself, gives each of its samples once, and then begins anew in another order.
    When a new epoch begins, a source continues where it stopped. A batch of size n has n samples of each
    source, or n times the number in `samples`, and counts as n samples. A mapping of datasets that is given
    as training data is combined, with the defaults.

    Args:
        sources: Datasets with a length, by name. A dataset's own `collate_fn`, if it has one, makes its part
            of a batch.
        samples: How many samples of a source belong together, by name; 1 for those that are left out.
        until: When an epoch ends: "longest", when the source that lasts longest has given each sample;
            "shortest", before the first source begins anew; or the name of a source: when that source has
            given each sample.

    Returns:
        A dataset that is training data.

    Raises:
        ConfigError: An argument names no source, or is out of range.
        DataError: A source is no dataset with a length, or has too few samples.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError('combined() needs sources by name, such as {"labelled": a, "unlabelled": b}')
    names = list(sources)
    if not isinstance(samples or {}, Mapping):
        raise ConfigError(f"combined(samples=) takes numbers by source: {{{names[0]!r}: 7}}, not {samples!r}")
    for name in samples or {}:
        if name not in names:
            raise ConfigError(f"samples has {name!r}, which is no source. {nearest(name, names)}")
    one_of("until", until, ("longest", "shortest", *names))
    for name, each in sources.items():
        _check_dataset(name, each)
    counts = [count(f"samples of {name!r}", (samples or {}).get(name, 1), at_least=1) for name in names]
    lasts = [-(-len(each) // number) for each, number in zip(sources.values(), counts, strict=True)]
    whole = min(len(each) // number for each, number in zip(sources.values(), counts, strict=True))
    length = {"longest": max(lasts), "shortest": whole, **dict(zip(names, lasts, strict=True))}[until]
    if not length:
        raise DataError("combined(): a source has fewer samples than belong together. Give it more")
    return Combined(names, list(sources.values()), counts, length)


def _check_dataset(name: str, source: Any) -> None:
    check_source(name, source, Combined.kind)
    has_length = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, IterableDataset) or not has_length:
        raise DataError(
            f"the training source {name!r} is no dataset with a length and an index, but a"
            f" {type(source).__name__}. Streams are zipped in one IterableDataset that yields mappings"
        )
    if not len(source):
        raise DataError(f"the training source {name!r} has no samples")


class Combined(Dataset[Any], OrderedByItself):
    """Datasets whose samples come together; see `combined`."""

    kind = "combination"

    def __init__(self, names: list[str], sources: list[Any], counts: list[int], length: int) -> None:
        self.names = names
        self.counts = counts
        self.sizes = [len(each) for each in sources]
        self._sources = sources
        self._length = length
        self._parts = list(pairwise(accumulate(counts, initial=0)))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: Sequence[int]) -> list[list[Any]]:
        parts = zip(self._sources, self._parts, strict=True)
        return [[source[index] for index in indices[first:last]] for source, (first, last) in parts]

    def collate_fn(self, items: list[list[list[Any]]]) -> dict[str, Any]:
        """Make a batch of each source."""
        return {
            name: getattr(source, "collate_fn", default_collate)(list(chain.from_iterable(samples)))
            for name, source, samples in zip(self.names, self._sources, zip(*items, strict=True), strict=True)
        }

    def order_settings(self) -> str:
        """Return what the order depends on beside the seed."""
        parts = zip(self.counts, self.names, self.sizes, strict=True)
        return "a combination of " + " with ".join(f"{k} of {name!r} ({size})" for k, name, size in parts)

    def sampler(self, seed: int) -> CombinedSampler:
        """Return the order of the samples."""
        return CombinedSampler(self, seed)


class CombinedSampler(Sampler[tuple[int, ...]]):
    """The indices of the samples that come together, in an epoch.

    Args:
        data: The combination.
        seed: What the orders of its sources depend on.
    """

    def __init__(self, data: Combined, seed: int) -> None:
        self._data = data
        self._passes = Passes(data.sizes, seed)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        index, counts = self._passes.index, list(enumerate(self._data.counts))
        first = self._epoch * len(self)
        for item in range(first, first + len(self)):
            yield tuple(
                index(source, item * number + each) for source, number in counts for each in range(number)
            )
