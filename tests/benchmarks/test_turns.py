"""Contestants in turns: all that are installed do the same work, and one that does not is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peers import HAND, OURS, ROSTER, installed, versions
from peers.hand import Hand
from rows import BY_NAME, MODELS, ROWS, Row
from turns import OtherPlace, Place, Turn, Turns, turn

pytestmark = pytest.mark.nightly  # and before the benchmarks themselves, by `make bench`
STEPS = 4
SMALL = [row for row in ROWS if row.table != MODELS and row.name != "200 parameters"]
HERE = [name for name in installed() if not ROSTER[name].apart]


@pytest.fixture(scope="module")
def place() -> Iterator[OtherPlace]:  # A process of its own: contestants change settings of the whole process
    made = OtherPlace([HAND, OURS])
    yield made
    made.close()


def same_work(place: OtherPlace, rows: list[Row]) -> None:
    lacks = {name: place.lacks(name) for name in place.names}
    for row in rows:
        turns = {n: place.turn(n, row, STEPS) for n in place.names if not set(row.needs) & set(lacks[n])}
        assert {HAND, OURS} <= set(turns), row.name
        for name, one in turns.items():
            assert one.same_work(turns[HAND]), (row.name, name, one, turns[HAND])


def test_ours_does_the_work_of_the_hand_written_loop_in_every_row(place: OtherPlace) -> None:
    same_work(place, SMALL)
    bare, clipped = (turn(Hand(), BY_NAME[name], STEPS).outcome for name in ("in memory, bare", "clipping"))
    assert bare != clipped, "a wish reaches the contestants"


def test_every_installed_contestant_does_the_same_work() -> None:
    every = OtherPlace(HERE)
    same_work(
        every, [next(row for row in SMALL if row.verb == verb) for verb in ("train", "evaluate", "predict")]
    )
    every.close()


def test_two_runs_make_the_same_calls_and_ours_no_more_than_the_hand_written_loop(place: OtherPlace) -> None:
    row = BY_NAME["in memory, bare"]
    ours, hand = place.calls(OURS, row), place.calls(HAND, row)
    assert place.calls(OURS, row) == ours
    assert 20 < ours["python"] <= hand["python"]


class Careless(Hand):  # takes a batch twice in place of another
    def train(self, job: Any) -> None:
        job.data[3] = job.data[4]
        super().train(job)


def test_a_contestant_that_does_other_work_is_refused_and_a_process_that_ends_is_named() -> None:
    with Turns([HAND, OURS]) as there:
        there.places[0].peers[OURS] = Careless()
        with pytest.raises(RuntimeError, match=r"drivetrain ends at .* did not do the same work"):
            there.measure(BY_NAME["in memory, bare"], 1, STEPS)
    ending = OtherPlace([HAND])
    ending.process.kill()
    ending.process.wait()
    with pytest.raises(RuntimeError, match="the process of hand-written has ended"):
        ending.lacks(HAND)
    assert ending.process.stdout is not None
    ending.process.stdout.close()
    with pytest.raises(BrokenPipeError):
        ending.process.stdin.close()  # type: ignore[union-attr]


def test_a_figure_is_the_difference_to_the_hand_written_loop_of_its_round() -> None:
    rounds = [(1.0, 3.0), (10.0, 13.0), (5.0, 5.5)]
    told = {HAND: [Turn(a, 0.5, 1.0) for a, _ in rounds], OURS: [Turn(b, 0.5, 1.0) for _, b in rounds]}

    class Told(Place):
        def turn(self, name: str, row: Row, steps: int) -> Turn:
            return told[name].pop(0)

    with Turns([HAND, OURS]) as there:
        there.places[0].__class__ = Told
        hand, ours = there.measure(BY_NAME["in memory, bare"], 3, STEPS)
    assert (hand.spent, hand.added, hand.ratio) == (5e6, 0.0, 1.0)
    assert (ours.spent, ours.added, ours.lowest, ours.highest) == (5.5e6, 2e6, 0.5e6, 3e6)
    assert ours.ratio == pytest.approx(1.3)


def test_versions_are_those_that_are_installed_and_an_unknown_name_is_refused() -> None:
    assert versions()["torch"] == torch.__version__
    assert installed([OURS]) == [HAND, OURS]
    with pytest.raises(SystemExit, match="no contestant is called 'Kerass'"):
        installed(["Kerass"])
