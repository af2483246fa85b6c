"""Check that all processes were given the same data: before a run, and on the first batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drivetrain.core.errors import DataError
from drivetrain.core.messages import logger
from drivetrain.data.feed import Feed
from drivetrain.data.fingerprint import as_text, matches
from drivetrain.data.rank_rounds import Evidence
from drivetrain.data.split_source import SplitSource
from drivetrain.distributed.ranks import Ranks

_LOG = logger(__name__)

_ADVICE = (
    "Give all ranks the same data, and each reads its part by itself. If you have divided the data by rank,"
    " give it as drivetrain.already_split(data)"
)


def check_data(feeds: Sequence[Feed], ranks: Ranks) -> None:
    """Check that the ranks have the same data, or that each has its own part if the user said so.

    Lengths and settings are compared now, in one exchange. The order and the contents of what each rank
    reads first are compared once it is read, because reading an iterable earlier would change what it gives.
    """
    if ranks.size == 1:
        return
    found = ranks.all_gather([(each.source.name, each.source.description()) for each in feeds])
    first = dict(found[0])
    for rank, theirs in enumerate(map(dict, found)):
        if theirs.keys() != first.keys():
            raise DataError(f"rank 0 has {_named(first)}, rank {rank} {_named(theirs)}. Give all the same")
        for name, description in theirs.items():
            _refuse_other(name, first[name], description, rank)
    for feed in feeds:
        feed.compare_first(_comparison(feed, ranks))


def _named(descriptions: dict[str, dict[str, object]]) -> str:
    return " and ".join(f"{name} data" for name in descriptions) or "no data"


def _refuse_other(name: str, first: dict[str, object], theirs: dict[str, object], rank: int) -> None:
    if first == theirs:
        return
    what = next(each for each in first if first[each] != theirs.get(each))
    one, other = first[what], theirs[what]
    if what == "kind":
        what = "it"
    raise DataError(
        f"the ranks were given different {name} data: {what} is {one} on rank 0 and {other} on rank {rank}."
        f" {_ADVICE}"
    )


def _comparison(feed: Feed, ranks: Ranks) -> Callable[[Evidence | None], None]:
    source, name = feed.source, feed.source.name
    copies = source.ranks.copies if isinstance(source, SplitSource) else None

    def compare(evidence: Evidence | None) -> None:
        found = ranks.all_gather(evidence)
        for rank, theirs in enumerate(found[1:], start=1):
            if copies is None:
                _refuse_different(name, found[0], theirs, rank)
            else:
                _check_part(name, found, rank, copies)

    return compare


def _refuse_different(name: str, first: Evidence | None, theirs: Evidence | None, rank: int) -> None:
    if first is None or theirs is None:
        if first is not theirs:
            empty, full = (0, rank) if first is None else (rank, 0)
            raise DataError(
                f"the {name} data has a batch on rank {full}, but none on rank {empty}. {_ADVICE}"
            )
        return
    if first.order is not None and theirs.order is not None and first.order != theirs.order:
        raise DataError(
            f"the order of the {name} data differs between ranks: its first indices are {first.order[0]} on"
            f" rank 0 and {theirs.order[0]} on rank {rank}. Seed your sampler with the same seed. {_ADVICE}"
        )
    one, other = first.contents, theirs.contents
    if one is not None and other is not None and not matches(one, other):
        what = "batch holds" if first.order is None else "samples of the same indices hold"
        raise DataError(
            f"the {name} data is not the same on all ranks: its first {what} {as_text(one)} on rank 0 and"
            f" {as_text(other)} on rank {rank}. Seed your random split or shuffle. {_ADVICE}"
        )


def _check_part(name: str, found: Sequence[Evidence | None], rank: int, copies: int) -> None:
    """Check that a rank was given the part of the ranks that work on the same batches, and of no others."""
    first = rank - rank % copies
    beside = found[first] if first < rank else found[0]
    one, other = [None if each is None else each.contents for each in (beside, found[rank])]
    if one is None or other is None:
        return
    if first == rank and matches(one, other):
        _LOG.warning(
            f"the {name} data is given as already split, but its first batch is the same on rank 0 and rank"
            f" {rank}. Is it divided by rank?"
        )
    if first < rank and not matches(one, other):
        raise DataError(
            f"rank {rank} was given another part of the {name} data than rank {first}, but"
            f" {copies} neighbouring ranks work on the same batches, by tensor_parallel or context_parallel."
            f" Divide the data by drivetrain.rank() // {copies} of drivetrain.world_size() // {copies}"
        )
