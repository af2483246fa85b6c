"""Several sources mixed by shares: the source that is next follows from what was drawn before."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, IterableDataset, Sampler

from drivetrain.core.errors import ConfigError, DataError, nearest
from drivetrain.core.intervals import Every
from drivetrain.core.validation import number, one_of
from drivetrain.data.known_tokens import tokens_in_common
from drivetrain.data.orders.length_grouped import lengths_of
from drivetrain.data.orders.passes import OrderedByItself, Passes, check_source
from drivetrain.data.protocols import has_state, order_settings, set_epoch
from drivetrain.data.shard import can_be_divided, shards_of

SOURCE = "source"
"""The entry of a sample that holds the number of its source."""


def mixture(
    sources: Mapping[str, Any],
    weights: Mapping[Any, Any],
    *,
    by: str = "samples",
    until: str = "first",
    tokens: str = "input_ids",
) -> Mixture | MixtureStream:
    """Mix datasets, or streams, by shares that hold at every point of the training.

    At each point a source has given its share of all samples, to within one sample; to within two where
    weights change abruptly. Each source is shuffled by itself, gives each of its samples once, and then
    starts again in another order. When a new epoch of the mixture begins, a source continues where it
    stopped.

    Samples that are mappings get an entry "source", the number of their source in `sources`.

    Args:
        sources: Datasets with a length, or streams of samples, by name.
        weights: The share of each source, by name; they need not add up to 1. Or such shares by the point
            from which they hold: `{0: {"web": 1, "code": 0}, "10K samples": {"web": 1, "code": 1}}`. A point
            is in the unit of `by`, counted in the whole mixture; a number will do.
        by: Whether shares are of "samples" or of "tokens". By tokens, the next sample of a source is assumed
            to be as long as its last one, so a share is exact to about one sample.
        until: When an epoch ends: "first" when one source has given all of its samples, "all" when each
            source has, "forever" never.
        tokens: The column of a sample that has its tokens, or their number, for `by="tokens"`.

    Returns:
        A dataset for training; a stream if one of the sources is a stream.

    Raises:
        ConfigError: Weights and sources do not match, or an argument is out of range.
        DataError: A source has no samples.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError('mixture() needs sources by name, such as {"web": web, "code": code}')
    one_of("by", by, ("samples", "tokens"))
    if by == "samples" and tokens != "input_ids":
        raise ConfigError(f'mixture(tokens={tokens!r}) is for by="tokens". Give that too, or leave it out')
    schedule = _weight_schedule(weights, list(sources), by)
    one_of("until", until, ("first", "all", "forever"))
    never = [name for index, name in enumerate(sources) if not schedule[-1].weights[index]]
    if never and until == "all":
        raise ConfigError(f'until="all" waits for each source, but {never[0]!r} has weight 0 in the end')
    for name, each in sources.items():
        check_source(name, each, Mixture.kind)
    form = _Mixing(list(sources), schedule, by, until, tokens)
    streams = [isinstance(each, IterableDataset) or not hasattr(each, "__len__") for each in sources.values()]
    if any(streams) and not all(streams):
        name = list(sources)[streams.index(False)]
        raise ConfigError(f"mixture() takes datasets or streams, not both: {name!r} has a length")
    kind = MixtureStream if streams[0] else Mixture
    return kind(list(sources.values()), form)


_ENDED = object()


class _WeightsFrom(NamedTuple):
    """Weights in whole numbers, and the point from which they hold."""

    start: int
    weights: list[int]


class _Mixing(NamedTuple):
    """The arguments of `mixture`."""

    names: list[str]
    schedule: list[_WeightsFrom]
    by: str
    until: str
    tokens: str

    def size(self, sample: Any) -> int:
        """Return how much a sample takes of its source's share."""
        return self.sizes([sample])[0] if self.by == "tokens" else 1

    def sizes(self, source: Any) -> list[int]:
        """Return the number of tokens of each sample of a dataset."""
        return lengths_of(source, self.tokens, "mixture", argument="mixture(): tokens")

    def order_settings(self) -> str:
        """Return what the turns depend on."""
        shares = ", ".join(
            f"from {each.start}: {' to '.join(map(str, each.weights))}" for each in self.schedule
        )
        names = ", ".join(map(repr, self.names))
        return f"a mixture of {names} by {self.by} until {self.until!r}, with shares {shares}"


def _weight_schedule(weights: Mapping[Any, Any], names: list[str], unit: str) -> list[_WeightsFrom]:
    if not isinstance(weights, Mapping) or len({isinstance(each, Mapping) for each in weights.values()}) > 1:
        raise ConfigError(f"weights must be shares by name, or such shares by points, not {weights!r}")
    by_point = any(isinstance(each, Mapping) for each in weights.values())
    points = {_point(point, unit): shares for point, shares in weights.items()} if by_point else {0: weights}
    if 0 not in points or len(points) < len(weights) * by_point:
        raise ConfigError(f"weights by points begin at 0, each once, not at {', '.join(map(str, weights))}")
    return [_WeightsFrom(start, _whole(given, names)) for start, given in sorted(points.items())]


def _point(point: Any, unit: str) -> int:
    """Return a point of the weights, a number or an interval such as "10M tokens"."""
    every = None if point == 0 else Every(point, None if isinstance(point, str) else unit)
    if every is not None and every.unit != unit:
        raise ConfigError(f"the weights of a mixture by {unit} change after {unit}, not at {point!r}")
    return 0 if every is None else int(every.amount)


def _whole(weights: Mapping[str, Any], names: list[str]) -> list[int]:
    """Return weights as whole numbers, in the order of the names."""
    for name in weights:
        if name not in names:
            raise ConfigError(f"weights have {name!r}, which is no source. {nearest(name, names)}")
    missing = [name for name in names if name not in weights]
    if missing:
        raise ConfigError(f"weights have no share of {missing[0]!r}; 0 leaves a source out")
    exact = [Fraction(str(number(f"the weight of {name!r}", weights[name], at_least=0))) for name in names]
    if not any(exact):
        raise ConfigError("all weights are 0")
    common = math.lcm(*(each.denominator for each in exact))
    return [int(each * common) for each in exact]


class _Turns:
    """Which source is next: of those that are not ahead of their share, the one whose sample is due first.

    Bennett and Zhang, "WF2Q: Worst-case Fair Weighted Fair Queueing", INFOCOM 1996.
    """

    def __init__(self, schedule: list[_WeightsFrom]) -> None:
        self._schedule = schedule
        count = len(schedule[0].weights)
        self.drawn = [0] * count
        """The samples that each source has given."""
        self._total = 0
        self._index = 0  # of the current weights in the schedule
        self._spent: list[float] = [0] * count  # under the current weights, and before them beyond the share
        self._last = [1] * count  # the size of each source's last sample

    def next(self) -> int:
        """Return the number of the source that gives the next sample."""
        weights, spent = self._schedule[self._index].weights, self._spent
        given, whole = sum(spent), sum(weights)
        return min(
            (each for each, weight in enumerate(weights) if weight),
            key=lambda each: (
                spent[each] * whole > given * weights[each],
                (spent[each] + self._last[each]) / weights[each],
            ),
        )

    def took(self, source: int, size: int) -> None:
        """Note that a source has given a sample."""
        self.drawn[source] += 1
        self._spent[source] += size
        self._last[source] = max(1, size)
        self._total += size
        while self._index + 1 < len(self._schedule) and self._schedule[self._index + 1].start <= self._total:
            weights, given = self._schedule[self._index].weights, sum(self._spent)
            shares = [given * weight / sum(weights) for weight in weights]
            self._spent = [spent - share for spent, share in zip(self._spent, shares, strict=True)]
            self._index += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what the next turns follow from."""
        return copy.deepcopy({name: each for name, each in vars(self).items() if name != "_schedule"})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        vars(self).update(copy.deepcopy(dict(state)))

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Begin these shares where turns with other shares or sources have ended."""
        self._total = state["_total"]
        self._index = bisect_right([each.start for each in self._schedule], self._total) - 1


def _collate_of(sources: list[Any]) -> Any:
    """Return how a batch is made of the sources' samples; None if they do not say so."""
    own = [getattr(each, "collate_fn", None) for each in sources]
    return own[0] if all(own) else None


def _named(sample: Any, source: int) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    if SOURCE in sample:
        raise DataError(f"mixture() adds an entry {SOURCE!r} to each sample, and a sample has one. Rename it")
    return {**sample, SOURCE: source}


class Mixture(ConcatDataset[Any], OrderedByItself):
    """Datasets with a length, mixed; see `mixture`."""

    kind = "mixture"

    def __init__(self, sources: list[Any], form: _Mixing) -> None:
        for name, each in zip(form.names, sources, strict=True):
            if not len(each):
                raise DataError(f"the source {name!r} of the mixture has no samples")
        super().__init__(sources)
        self.form, self.names, self.is_endless = form, form.names, form.until == "forever"
        self.collate_fn = _collate_of(sources)
        self.lengths = [form.sizes(each) for each in sources] if form.by == "tokens" else None

    def __getitem__(self, index: int) -> Any:
        source = bisect_right(self.cumulative_sizes, index)
        return _named(super().__getitem__(index), source)  # type: ignore[no-untyped-call]

    def order_settings(self) -> str:
        """Return what the order depends on beside the seed."""
        return self.form.order_settings()

    def sampler(self, seed: int) -> EndlessSampler:
        """Return the order of the samples."""
        return (EndlessSampler if self.is_endless else MixtureSampler)(self, seed)


class EndlessSampler(Sampler[int]):
    """The order of a mixture without an end.

    Args:
        data: The mixture.
        seed: What the orders of its sources depend on.
    """

    def __init__(self, data: Mixture, seed: int) -> None:
        self._data = data
        self._passes = Passes([len(each) for each in data.datasets], seed)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        turns = _Turns(self._data.form.schedule)
        while True:
            yield self._index(turns)[1]

    def _index(self, turns: _Turns) -> tuple[int, int]:
        """Take a turn; return the source and the index of its sample in the mixture."""
        source, lengths = turns.next(), self._data.lengths
        index = self._passes.index(source, turns.drawn[source])
        turns.took(source, 1 if lengths is None else lengths[source][index])
        return source, index + (self._data.cumulative_sizes[source - 1] if source else 0)


class MixtureSampler(EndlessSampler):
    """The order of a mixture in an epoch, in which each source goes on where the epoch before has ended."""

    def __init__(self, data: Mixture, seed: int) -> None:
        super().__init__(data, seed)
        self._epoch = 0
        self._starts: list[dict[str, Any]] = [_Turns(data.form.schedule).state_dict()]  # of each epoch
        self._counts: list[int] = []  # the samples of each epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        while len(self._counts) <= self._epoch:
            for _ in self._drawn(len(self._counts)):
                pass
        return self._counts[self._epoch]

    def __iter__(self) -> Iterator[int]:
        len(self)
        return self._drawn(self._epoch)

    def _drawn(self, epoch: int) -> Iterator[int]:
        turns = _Turns(self._data.form.schedule)
        turns.load_state_dict(self._starts[epoch])
        left = [len(each) for each in self._data.datasets]  # type: ignore[arg-type]
        waits_for, count = len(left) if self._data.form.until == "all" else 1, 0
        while waits_for:
            source, index = self._index(turns)
            left[source], count = left[source] - 1, count + 1
            waits_for -= not left[source]
            yield index
        if epoch == len(self._counts):
            self._counts.append(count)
            self._starts.append(turns.state_dict())


class MixtureStream(IterableDataset[Any]):
    """Streams of samples, mixed; see `mixture`. It has a state if each stream has one."""

    def __init__(self, sources: list[Iterable[Any]], form: _Mixing) -> None:
        self._sources = sources
        self._form, self.names, self.is_endless = form, form.names, form.until == "forever"
        self._turns = _Turns(form.schedule)
        self._order = form.order_settings()
        self.collate_fn = _collate_of(sources)
        self.tokens_per_sample = tokens_in_common(sources)
        self._passes = [0] * len(sources)
        self._iterators: dict[int, Iterator[Any]] = {}
        self._ended: set[int] = set()  # in this epoch
        if all(map(has_state, sources)):
            self.state_dict, self.load_state_dict = self._state, self._load
        if all(map(can_be_divided, sources)):
            self.shard, self.num_shards = self._shard, min(map(shards_of, sources))

    def _shard(self, num_shards: int, index: int) -> MixtureStream:
        return MixtureStream([each.shard(num_shards, index) for each in self._sources], self._form)  # type: ignore[attr-defined]

    def order_settings(self) -> str:
        """Return what the order depends on beside the states of the streams."""
        own = zip(self._form.names, map(order_settings, self._sources), strict=True)
        return "; ".join([self._order, *(f"{name!r}: {text}" for name, text in own if text)])

    def _state(self) -> dict[str, Any]:
        begun = [each for each in range(len(self._sources)) if each in self._iterators]
        return {
            "turns": self._turns.state_dict(),
            "order": self._order,
            "passes": dict(zip(self.names, self._passes, strict=True)),
            "ended": sorted(self._ended),
            "streams": {self._form.names[each]: self._sources[each].state_dict() for each in begun},  # type: ignore[attr-defined]
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        is_same = state["order"] == self._order
        if is_same:
            self._turns.load_state_dict(state["turns"])
        else:  # between two epochs: each source goes on
            self._turns.begin_after(state["turns"])
        self._passes = [state["passes"].get(name, 0) for name in self.names]
        self._ended, self._iterators = set(state["ended"]) if is_same else set(), {}
        for index, name in enumerate(self._form.names):
            if name in state["streams"]:
                self._sources[index].load_state_dict(copy.deepcopy(state["streams"][name]))  # type: ignore[attr-defined]
                self._begin(index)

    def _begin(self, source: int) -> None:
        set_epoch(self._sources[source], self._passes[source])
        self._iterators[source] = iter(self._sources[source])

    def __iter__(self) -> Iterator[Any]:
        while True:
            source = self._turns.next()
            begins = source not in self._iterators
            if begins:
                self._begin(source)
            sample = next(self._iterators[source], _ENDED)
            if sample is not _ENDED:
                self._turns.took(source, self._form.size(sample))
                yield _named(sample, source)
            elif begins:
                raise DataError(f"the source {self._form.names[source]!r} of the mixture gave no sample")
            elif self._end(source):
                return

    def _end(self, source: int) -> bool:
        """Note that a stream has ended, and return whether the epoch has."""
        del self._iterators[source]
        self._passes[source] += 1
        self._ended.add(source)
        is_first, are_all = self._form.until == "first", len(self._ended) == len(self._sources)
        is_over = not self.is_endless and (is_first or are_all)
        if is_over:
            self._ended.clear()
        return is_over
