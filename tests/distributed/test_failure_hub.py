"""Rank 0's part of the failure channel counts what a rank has said for no longer than it may be true."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from drivetrain.distributed.failure_hub import Hub
from drivetrain.distributed.failure_wire import Line, connect
from drivetrain.distributed.silence import machine

LOOKS = 5
"""So many ticks must all have been at rest."""

LONG = 100
"""Looks of a rank that has been at rest for long."""


class Rank:
    """What a rank says to the hub: the words of its channel, without the process."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        offer = {"port": hub.port, "hosts": [], "machine": machine()}
        self._line: Line = connect(rank, offer, None, 5.0)
        self.say("hello", 0, token=hub.token, rank=rank, machine=machine(), pid=os.getpid(), stacks=(0, -1))

    def say(self, kind: str, looks: int, asleep: int = 0, **more: object) -> None:
        """A message, and for how many looks the rank has been at rest, or asleep for ever."""
        place = "sleep" if asleep else "all_reduce"
        state = {
            "where": "",
            "progress": None,
            "looks": looks,
            "asleep": asleep,
            "place": place,
            "passed": -1,
        }
        # The hub may have ended since it was last heard, but with a decision only.
        assert self._line.send(kind=kind, **state, **more) or self._hub.cause is not None

    def ticks(self) -> int | None:
        """How many ticks of the hub have passed since this was last asked; None when it has ended."""
        found = self._line.receive()
        return None if found is None else len(found)

    def close(self) -> None:
        """End the line."""
        self._line.close()


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    """A hub of two ranks: with ticks of a tenth of a second and no limit for hangs, or with such a limit, of
    one tick.
    """
    hang = getattr(request, "param", None)
    if hang is None:
        found = Hub(2, True, timeout=0.5, hang_timeout=None, deadlock_timeout=LOOKS * 0.1)
    else:
        found = Hub(2, True, timeout=5 * hang, hang_timeout=hang, deadlock_timeout=None)
    yield found
    found.leave()


@pytest.fixture
def ranks(hub: Hub) -> Iterator[list[Rank]]:
    """Its two ranks."""
    found = [Rank(hub, rank) for rank in range(2)]
    yield found
    for each in found:
        each.close()


def pass_ticks(rank: Rank, number: int, looks: int | None, asleep: int = 0) -> None:
    """Let so many ticks of the hub pass, or its end come.

    In each of them a rank tells for how long it has been at rest; with None it says nothing.
    """
    rank.ticks()
    passed = 0
    while passed < number:
        time.sleep(0.01)
        now = rank.ticks()
        if now is None:
            return
        if now and looks is not None:
            rank.say("beat", looks, asleep)
        passed += now


def test_a_wait_that_ended_with_the_last_word_of_another_rank_is_no_deadlock(
    hub: Hub, ranks: list[Rank]
) -> None:
    waiting, late = ranks
    late.say("beat", 0)
    pass_ticks(waiting, 2 * LOOKS, looks=LONG)
    # It came at last, and both went on: one to its end, the other to work of which it has yet to tell.
    late.say("bye", 0)
    pass_ticks(late, 1, looks=None)
    pass_ticks(waiting, 2 * LOOKS, looks=0)
    waiting.say("bye", 0)
    assert hub.finished.wait(20)
    assert hub.cause is None


def test_a_rank_that_waits_for_one_that_has_left_is_a_deadlock(hub: Hub, ranks: list[Rank]) -> None:
    waiting, left = ranks
    left.say("bye", 0)
    pass_ticks(waiting, LONG, looks=LONG)
    assert hub.cause is not None
    assert hub.cause.what.startswith("the ranks wait for one another: rank 0 in all_reduce")


def test_a_rank_that_sleeps_for_ever_is_named_when_the_others_wait_for_it(
    hub: Hub, ranks: list[Rank]
) -> None:
    waiting, sleeping = ranks
    for _ in range(LONG):
        if hub.cause is None:
            sleeping.say("beat", 0, asleep=LONG)
            pass_ticks(waiting, 1, looks=LONG)
    assert hub.cause is not None
    assert hub.cause.what == (
        "rank 1 will not come back from a sleep, at its step; rank 0 waits in all_reduce"
    )
    assert (hub.cause.kind, hub.cause.rank, hub.cause.stuck) == ("hang", 1, (1,))


@pytest.mark.parametrize(("looks", "asleep"), [(0, 0), (0, LONG)])
def test_a_rank_that_sleeps_while_another_works_or_sleeps_too_is_left_alone(
    hub: Hub, ranks: list[Rank], looks: int, asleep: int
) -> None:
    other, sleeping = ranks
    for _ in range(3 * LOOKS):
        sleeping.say("beat", 0, asleep=LONG)
        pass_ticks(other, 1, looks, asleep)
    assert hub.cause is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rest_of_which_a_rank_has_told_long_ago_is_not_counted(
    hub: Hub, ranks: list[Rank], rank: int
) -> None:
    silent, other = ranks[rank], ranks[1 - rank]
    silent.say("beat", LONG)
    pass_ticks(other, LOOKS + 2, looks=0)
    silent.say("held", LONG, asked=None)  # an answer, which it has not looked anew for
    pass_ticks(other, 2 * LOOKS, looks=LONG)
    assert hub.cause is None
    for _ in range(LONG):
        if hub.cause is None:
            silent.say("beat", LONG)
            pass_ticks(other, 1, looks=LONG)
    assert hub.cause is not None, "all are at rest"


@pytest.mark.parametrize("hub", [0.5], indirect=True)
@pytest.mark.parametrize(("looks", "asleep"), [(LONG, LONG), (0, LONG), (LONG, 0)])
def test_a_short_limit_for_hangs_waits_until_it_is_known_who_waits(
    hub: Hub, ranks: list[Rank], looks: int, asleep: int
) -> None:
    """That a rank waits, or sleeps, it can tell by its third word at the earliest."""
    waiting, sleeping = ranks
    pass_ticks(waiting, 1, looks=0)
    assert hub.cause is None
    sleeping.say("beat", 0, asleep)
    for _ in range(LONG):
        if hub.cause is None:
            pass_ticks(waiting, 1, looks)
    assert hub.cause is not None
    assert hub.cause.what == "no progress for 0.5 s; rank 1 is at its step, the others wait for it"
    assert (hub.cause.rank, hub.cause.stuck) == (1, (1,))
