"""Ranks that would make different collective calls get an error that says which rank makes which."""

from collections.abc import Callable

import pytest
import torch
from tests.support.ranks import on_two_ranks

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.collective_order import CollectiveOrder
from drivetrain.distributed.ranks import Ranks


def make() -> CollectiveOrder:
    return CollectiveOrder(Ranks(torch.distributed.get_rank(), 2), "the ranks differ", "Do the same")


def run(order: CollectiveOrder, *forwards: str) -> int:
    before = order.comparisons
    for calls in forwards:
        order.begin("forward")
        for each in calls:
            order.next(each)
    return order.comparisons - before


def repeated() -> list[int]:
    order = make()
    counts = [run(order, each, each) for each in ("abcd", "abcd", "abd", "abcd", "abbbbd")]
    counts.append(run(order, *["abcd", "abbbbd"] * 5))
    order.close()
    return counts


def test_calls_that_repeat_the_last_step_are_not_compared() -> None:
    # The first step whole, with what follows its end; later only what a call of the last step did not follow.
    assert on_two_ranks(repeated) == [[5, 0, 1, 1, 4, 10]] * 2


def differing() -> list[str]:
    found, rank = [], torch.distributed.get_rank()
    for known, first, second in (
        ([], "ab", "ac"),
        (["abc"] * 2, "acb", "aab"),
        (["abc", "abc"], "abc", "ac"),
    ):
        order = make()
        run(order, *known)
        refused: list[str] = []
        try:
            run(order, second if rank else first)
        except StrategyError as error:
            refused = [str(error)]
        torch.distributed.barrier()  # the collective of a rank that goes on
        order.close()
        found += refused
    return found


class Ticks:  # an event that never waits; each wait does the next thing, and the last one sets it
    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = iter(acts)

    def wait(self, seconds: float) -> bool:
        act = next(self._acts, None)
        return act is None or bool(act())


def published() -> list[bytes]:
    order, found = make(), list[bytes]()
    run(order, "abc")
    order.close()

    def still() -> None:
        found.append(order._store.get(f"{order._key}/at/{order._rank}"))

    def moves() -> None:
        order._made += 1

    def asks() -> None:
        torch.distributed.barrier()
        order._store.add(f"{order._key}/asked", 1)
        torch.distributed.barrier()

    order._closed = Ticks(still, still, still, moves, still, still, asks, still)  # type: ignore[assignment]
    order._watch()
    return found[2:]


def test_a_rank_that_stands_still_writes_nothing_into_the_store_unless_another_asks() -> None:
    assert on_two_ranks(published)[0] == [b"3", b"3", b"3", b"4"]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_error_says_which_rank_makes_which_call() -> None:
    at_once, known, gone_on = (
        f"the ranks differ: rank 0 {first}; rank 1 {second}. Do the same"
        for first, second in ("bc", "ca", "bc")
    )
    assert on_two_ranks(differing) == [[at_once, known], [at_once, known, gone_on]]
