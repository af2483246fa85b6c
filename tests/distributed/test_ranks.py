"""What processes do together: one outcome for all, also when it is an error."""

import pytest
import torch
from tests.support.ranks import on_two_ranks

from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.distributed.tensors import average_gradients

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def fail():
    raise CheckpointError("no room")


def test_a_process_alone_waits_for_nobody():
    assert Ranks.of_job() == ALONE
    assert ALONE.all_gather("a") == ["a"]
    assert ALONE.first(lambda: "b") == "b"
    assert ALONE.together(lambda: "c") == ["c"]
    for act in (ALONE.first, ALONE.together):
        with pytest.raises(CheckpointError, match="no room"):
            act(fail)


class OddError(Exception):
    def __init__(self, number, handle):
        super().__init__(number, handle)


def together():
    ranks = Ranks.of_job()

    def fails_on(rank, error):
        with pytest.raises(Exception, match=r"no room|3") as caught:
            ranks.together(lambda: error() if ranks.rank == rank else None)
        return type(caught.value).__name__, getattr(caught.value, "__notes__", [])

    def odd():
        raise OddError(3, lambda: None)

    def fails_first():
        with pytest.raises(CheckpointError, match="no room"):
            ranks.first(fail)

    fails_first()
    return (
        ranks.all_gather(ranks.rank * 10),
        ranks.first(lambda: f"from {ranks.rank}"),
        ranks.together(lambda: ranks.rank + 1),
        fails_on(1, fail),
        fails_on(0, odd),
        ranks.all_gather("still together"),
        [messages(ranks, length) for length in (0, 900, 1100, 5000)],
    )


def messages(
    ranks, length
):  # of any length, and of another one on the other rank; and the exchanges they take
    calls, counted = [], ("all_gather", "all_reduce", "broadcast", "gather")
    with pytest.MonkeyPatch.context() as patch:
        for name in counted:
            call = getattr(torch.distributed, name)
            patch.setattr(torch.distributed, name, lambda *a, c=call, **k: calls.append(c) or c(*a, **k))
        text = "x" * length * ranks.rank
        of_all = ranks.all_gather(text), ranks.first(lambda: "y" * length), ranks.gather_first(text)
    return [*map(len, of_all[0])], len(of_all[1]), of_all[2] and [*map(len, of_all[2])], len(calls)


@needs_gloo
def test_all_get_the_same_also_an_error_of_one():
    first, second = on_two_ranks(together)
    assert first[:3] == second[:3] == ([0, 10], "from 0", [1, 2])
    assert first[3] == ("CheckpointError", ["drivetrain: this happened on rank 1"])
    assert second[3] == ("CheckpointError", [])
    assert (first[4][0], second[4][0]) == ("OddError", "RuntimeError")
    assert first[5] == second[5] == ["still together"] * 2
    for number, length in enumerate((0, 900, 1100, 5000)):
        taken = 4 if length < 1000 else 6
        assert first[6][number] == ([0, length], length, [0, length], taken)
        assert second[6][number] == ([0, length], length, None, taken)


def grouped():
    ranks = Ranks.of_job().grouped(2)
    mine = torch.distributed.get_rank() + 1.0
    return ranks.total([mine]), ranks.add(torch.tensor(mine)).item(), ranks.all_gather(mine)


@needs_gloo
def test_of_neighbours_with_the_same_values_the_first_counts():
    assert on_two_ranks(grouped) == [([1.0], 1.0, [1.0])] * 2
    four = type("Four", (Ranks,), {"_of_each": lambda self, value: [0, 1, 2, 3]})
    assert four(0, 2, copies=2).all_gather(0) == [0, 2]


def averaged():
    rank = torch.distributed.get_rank()
    both, one, none = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    other = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    both.grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    other.grad = torch.full((1,), 4.0 * rank, dtype=torch.float64)
    if rank == 0:
        one.grad = torch.tensor([6.0, 8.0])
    average_gradients([both, one, none, other], 2)
    return [None if each.grad is None else each.grad.tolist() for each in (both, one, none, other)]


@needs_gloo
def test_average_gradients_of_parameters_that_some_or_no_rank_has():
    assert on_two_ranks(averaged) == [[[1.5, 3.0], [3.0, 4.0], None, [2.0]]] * 2
