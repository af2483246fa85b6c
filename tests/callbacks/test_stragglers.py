"""A rank that the others wait for is named, by what it does between collectives."""

from drivetrain.callbacks.stragglers import LEAST, Stragglers


def after(stragglers: Stragglers, *rounds: list[float]) -> list[str | None]:
    """The lines of comparisons, each over as long a time for all ranks: the slowest one's."""
    shares = [(0.0, 0.0)] * len(rounds[0])
    assert stragglers.compare(shares, 0) == (None, None), "there is nothing to compare with"
    lines = []
    for number, each in enumerate(rounds, 1):
        wall = max(*each, LEAST)
        shares = [(own + o, waited + wall - o) for (own, waited), o in zip(shares, each, strict=True)]
        lines.append(stragglers.compare(shares, 10 * number)[1])
    return lines


def test_a_rank_that_is_slow_twice_in_a_row_is_named_once() -> None:
    slow, even = [10.0, 10.0, 14.0, 9.0], [10.0, 10.0, 10.0, 10.0]
    first, second, *rest = after(Stragglers(0.2), slow, slow, slow, even, slow, slow)
    assert first is None
    assert second is not None
    assert second.startswith("rank 2 is slow")
    assert "1.40 times as long as the median of all ranks (1.4 s an update, not 1 s)" in second
    assert rest == [None] * 4
    # Of two ranks it is compared with the other one; a rank stands for its copies.
    assert "2.00 times" in str(after(Stragglers(0.5), [6.0, 12.0], [6.0, 12.0])[1])
    assert str(after(Stragglers(0.2, copies=2), [10.0, 20.0], [10.0, 20.0])[1]).startswith("rank 2 is slow")


def test_chance_names_nobody() -> None:
    slow = [10.0, 14.0], [14.0, 10.0]
    assert after(Stragglers(0.2), *slow, *slow) == [None] * 4, "now this one, now that one"
    assert after(Stragglers(0.2), *[[10.0, 11.9]] * 4) == [None] * 4, "not by the margin"


def test_less_than_ten_seconds_are_not_compared_but_counted() -> None:
    stragglers = Stragglers(0.2)
    stragglers.compare([(0.0, 0.0)] * 2, 0)
    assert stragglers.compare([(4.0, 2.0), (6.0, 0.0)], 5) == (None, None)
    found, _ = stragglers.compare([(8.0, 4.0), (12.0, 0.0)], 10)
    assert found is not None
    assert (found.slowest, found.ratio, found.waiting) == (1, 1.5, 4 / 24)
