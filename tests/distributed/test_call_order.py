"""Ranks that make different calls get an error that names the first one, with what they exchange next."""

import pytest
import torch
from tests.support.ranks import on_two_ranks

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.call_order import CallOrder, unequal_calls
from drivetrain.distributed.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def exchanged() -> list[object]:
    found: list[object] = []
    for calls in (("abc", "abc"), ("abc", "acb"), ("ab", "abc")):
        ranks = Ranks.of_job()
        for each in calls[ranks.rank]:
            ranks.grouped(2).order.note(each)
        try:
            found.append(ranks.all_gather(ranks.rank))
        except StrategyError as error:
            found.append(str(error).partition(". ")[0])
        try:
            ranks.together(lambda: {}[0] if torch.distributed.get_rank() else None)
        except (KeyError, RuntimeError) as error:
            found.append(type(error).__name__)
        found.append(ranks.sibling().all_gather(0))  # which a thread uses, at any time
        ranks.close()
    return found


def test_every_gathering_compares_the_calls_of_the_ranks_and_an_error_of_one_comes_first() -> None:
    first, second = on_two_ranks(exchanged)
    problem = "the ranks run different parts of the model: "
    refused = (f"{problem}rank 0 b; rank 1 c", f"{problem}rank 0 makes no other call; rank 1 c")
    own = "RuntimeError", "KeyError"
    for found, error in zip((first, second), own, strict=True):
        assert found == [[0, 1], error, [0, 0], refused[0], error, [0, 0], refused[1], error, [0, 0]]


def test_the_first_difference_is_found_among_the_calls_that_all_ranks_still_know() -> None:
    known, forgotten = unequal_calls([(0, "ab"), (1, "c"), (0, "ab")]), unequal_calls([(7, "ab"), (8, "b")])
    assert "model: ranks 0, 2 b; rank 1 c. " in str(known)
    assert "model: all ranks differ in an earlier call. " in str(forgotten)


def test_a_place_has_the_last_call_and_a_new_call_is_told_before_it_is_made() -> None:
    order, told = CallOrder(), list[str]()
    assert (order.after("in training"), order.listed()) == ("in training", "")
    order.tell = lambda: told.append(order.after("here"))
    for each in "aba":
        order.note(each)
    assert told == ["here (call 1: a)", "here (call 2: b)"]
    assert order.listed() == "call 1: a\ncall 2: b\ncall 3: a\n"
