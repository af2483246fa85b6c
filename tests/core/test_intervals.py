"""Intervals: how they are written, when they are due, and what is refused."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.core.calendar import Calendar, Trigger
from drivetrain.core.intervals import Every, log_spaced
from drivetrain.core.progress import Progress

# How intervals are written.


def test_an_interval_may_be_written_in_many_ways() -> None:
    written: dict[Any, tuple[float, str]] = {
        **dict.fromkeys((500, "500", "  500  steps ", "500 steps"), (500, "steps")),
        **dict.fromkeys(("1 epoch", "epoch", "1 Epochs", Every("1 epoch")), (1, "epochs")),
        ".5epochs": (0.5, "epochs"),
        "1.5 hours": (1.5, "hours"),
        timedelta(minutes=2): (120, "seconds"),
        "1_000_000 tokens": (1_000_000, "tokens"),
        "2.5e3 samples": (2500, "samples"),
        **dict.fromkeys(("1.1B tokens", "1_100 m tokens", "1.1e9 tokens"), (1_100_000_000, "tokens")),
        **dict.fromkeys(("0.2", " .2 "), (0.2, "runs")),
    }
    assert {each: (Every(each).amount, Every(each).unit) for each in written} == written
    assert (Every(2, "epochs"), Every(0.5, "hour")) == (Every("2 epoch"), Every("0.5 hours"))
    texts = ["1 step", "500 steps", "1000000 tokens", "0.25 epochs"]
    assert [str(Every(each)) for each in (1, 500, "1_000_000 tokens", "0.25 epochs")] == texts
    for every in (
        *map(Every, ("0.1 epochs", "1234567.25 seconds", "1e12 tokens", "0.2", 3)),
        Every(1e-7, "hours"),
    ):
        assert Every(str(every)) == pickle.loads(pickle.dumps(every)) == copy.deepcopy(every) == every
    assert [Every(each).seconds for each in ("2 minutes", "1 hour", "2 epochs")] == [120, 3600, None]


def steps(per_epoch: int, epochs: int, skipped: Any = ()) -> Iterator[tuple[int, Progress, bool]]:
    """The progress after each window of two samples, five tokens and a second; `skipped` step nothing."""
    progress = Progress()
    for window in range(1, per_epoch * epochs + 1):
        progress.samples += 2
        progress.tokens += 5
        progress.seconds += 1.0
        if window not in skipped:
            progress.steps += 1
            progress.epoch_steps += 1
        ended = window % per_epoch == 0
        progress.epoch += ended
        yield window, progress, ended
        if ended:
            progress.epoch_steps = 0


def of(per_epoch: int | None) -> Calendar:
    return Calendar(length=per_epoch, counts_samples=False)


def due(trigger: Trigger, *run: Any) -> list[int]:
    return [window for window, *state in steps(*run) if trigger.due(*state)]


def test_a_delayed_trigger_is_not_due_before_it_begins() -> None:
    points = ("7 steps", "8 steps", "1 epoch", "1.5 epochs", "13 samples", "9 seconds", "3 epochs")
    found = [due(Trigger(Every(2), of(5), begins=Every(begins)), 5, 2) for begins in points]
    assert found == [[8, 10], [8, 10], [6, 8, 10], [8, 10], [8, 10], [10], []]
    # The end of an epoch is the point at which the next one begins.
    assert due(Trigger(Every("1 epoch"), begins=Every("2 epochs")), 5, 3) == [10, 15]


def test_the_first_step_is_due_once() -> None:
    found = [due(Trigger(Every(each), of(5), first_step=True), 5, 1) for each in (3, "1 step", "1 epoch")]
    assert found == [[1, 3], [1, 2, 3, 4, 5], [1, 5]]
    trigger = Trigger(Every(4), of(5), first_step=True)
    assert due(trigger, 5, 1, {1, 3}) == [2]
    trigger.start(Progress(steps=1, epoch_steps=1))
    assert not trigger.due(Progress(steps=1, epoch_steps=1, skipped=1), False)
    assert not Trigger(None).due(Progress(steps=1, epoch_steps=1), False)


def test_listed_steps_are_due_at_each_and_log_spaced_ones_up_to_the_runs_last() -> None:
    listed = Every([0, 1, 2, 4, 8])
    assert Every(str(listed)) == Every((0, 1, 2, 4, 8)) == pickle.loads(pickle.dumps(listed)) == listed
    assert (Trigger(listed).at_start, Trigger(Every([1])).at_start) == (True, False)
    assert due(Trigger(listed, of(5)), 5, 2) == [1, 2, 4, 8]
    assert due(Trigger(listed, of(5)), 5, 2, {3}) == [1, 2, 5, 9]  # after a skipped window
    trigger = Trigger(listed, of(5))
    trigger.start(Progress(steps=4, epoch_steps=4))
    assert [step for step in range(4, 10) if trigger.due(Progress(steps=step, epoch_steps=1), False)] == [8]
    calendar = of(5)
    for steps, found in ((10, [1, 2, 5, 10]), (3, [1, 2, 3])):
        calendar.whole = Every(steps)
        assert due(Trigger(log_spaced(4), calendar), 5, 2) == found
    assert Every(str(log_spaced(12))) == log_spaced(12)


def test_an_interval_of_steps_may_end_with_epochs_too() -> None:
    for steps, found in ((7, [5, 7, 10, 14, 15]), (4, [4, 5, 8, 10, 12, 15]), (5, [5, 10, 15])):
        assert due(Trigger(Every(steps), ends_epochs=True), 5, 3) == found


# Random runs and one rule for every unit: an interval has ends on a clock of its unit. After a step, and
# when an epoch ends, it is due if its clock has reached an end since the run asked before. Nothing else, such
# as a restart, makes it due or keeps it from being due.


@dataclass(frozen=True)
class Window:  # what one window of micro-batches adds to the counts
    applied: bool  # it makes a step
    samples: int
    tokens: int
    seconds: float
    last: bool  # its epoch ends with it
    restarts: bool  # the run is killed after it, and continues from here

    @property
    def is_asked(self) -> bool:
        return self.applied or self.last


@dataclass(frozen=True)
class Case:
    every: Every
    windows: tuple[Window, ...]
    per_epoch: int | None  # windows in an epoch; needed for parts of one only
    is_saver: bool  # it is asked after the run has closed an epoch, as savers are, or before


def ends_and_clock(case: Case) -> tuple[list[Fraction], list[Fraction]]:
    """The ends of the interval, and its clock after each window, all exact."""
    unit, windows = case.every.unit, case.windows
    amount = Fraction(case.every.amount)
    if unit == "epochs" and amount < 1:
        return ends_and_clock_of_part(case)
    adds = {
        "steps": [each.applied for each in windows],
        "epochs": [each.last for each in windows],
        "samples": [each.samples for each in windows],
        "tokens": [each.tokens for each in windows],
    }.get(unit, [each.seconds for each in windows])
    amount *= {"minutes": 60, "hours": 3600}.get(unit, 1)
    clock = list(accumulate(map(Fraction, adds)))
    return [number * amount for number in range(1, int(clock[-1] / amount) + 1)], clock


def ends_and_clock_of_part(case: Case) -> tuple[list[Fraction], list[Fraction]]:
    """The same for a part of an epoch, which begins anew with every epoch; the clock counts epochs."""
    assert case.per_epoch is not None
    # A third is meant, not the float that is next to it.
    part = Fraction(case.every.amount).limit_denominator(30)
    clock, epoch, steps = [], 0, 0
    for window in case.windows:
        steps += window.applied
        clock.append(epoch + (Fraction(1) if window.last else Fraction(steps, case.per_epoch)))
        if window.last:
            epoch, steps = epoch + 1, 0
    return [start + number * part for start in range(epoch) for number in range(1, int(1 / part) + 1)], clock


def expected(case: Case) -> list[int]:  # the windows after which the interval is due, by the rule
    ends, clock = ends_and_clock(case)
    due, before = [], Fraction(0)
    for number, window in enumerate(case.windows):
        if window.is_asked:
            if any(before < end <= clock[number] for end in ends):
                due.append(number)
            before = clock[number]
    return due


def found(case: Case) -> list[int]:
    """The windows after which `Trigger` says that it is due, asked as a run asks it."""
    trigger, progress, due = Trigger(case.every, of(case.per_epoch)), Progress(), []
    for number, window in enumerate(case.windows):
        progress.samples += window.samples
        progress.tokens += window.tokens
        progress.seconds += window.seconds
        progress.steps += window.applied
        progress.epoch_steps += window.applied
        progress.epoch += window.last
        is_due = not case.is_saver and window.is_asked and trigger.due(progress, window.last)
        if window.last:
            progress.epoch_steps = 0
        is_due |= case.is_saver and window.is_asked and trigger.due(progress, window.last)
        if is_due:
            due.append(number)
        if window.restarts and window.is_asked:
            stored, progress = progress.to_json(), Progress()
            progress.load_json(dict(stored))
            trigger = Trigger(case.every, of(case.per_epoch))
            trigger.start(progress)
    return due


INTERVALS = st.one_of(
    st.builds(Every, st.integers(1, 7), st.just("steps")),
    st.builds(Every, st.integers(1, 3), st.just("epochs")),
    st.builds(Every, st.integers(1, 20), st.sampled_from(["samples", "tokens"])),
    # Times in quarters of a second, which are exact in binary, as the sums of them are.
    st.builds(lambda quarters: Every(quarters / 4, "seconds"), st.integers(1, 40)),
    st.builds(lambda part: Every(part / 8, "minutes"), st.integers(1, 8)),
    st.builds(lambda part: Every(part / 1024, "hours"), st.integers(1, 16)),
)
PARTS = st.fractions(Fraction(1, 30), Fraction(29, 30), max_denominator=30)


def windows(epochs: list[int]) -> st.SearchStrategy[tuple[Window, ...]]:
    return st.tuples(
        *(
            st.builds(
                Window,
                applied=st.sampled_from([True, True, False]),
                samples=st.integers(1, 9),
                tokens=st.integers(0, 30),
                seconds=st.integers(0, 60).map(lambda quarters: quarters / 4),
                last=st.just(number == length),
                restarts=st.booleans(),
            )
            for length in epochs
            for number in range(1, length + 1)
        )
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Runs whose epochs differ in length, some windows of which make no step."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return Case(draw(INTERVALS), draw(windows(lengths)), None, draw(st.booleans()))


@st.composite
def cases_of_parts(draw: st.DrawFn) -> Case:
    length, epochs = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    whole_steps = st.builds(Fraction, st.integers(1, length - 1), st.just(length)) if length > 1 else PARTS
    every = Every(float(draw(PARTS | whole_steps)), "epochs")
    return Case(every, draw(windows([length] * epochs)), length, draw(st.booleans()))


@pytest.mark.parametrize("kind", [cases, cases_of_parts])
@given(st.data())
def test_an_interval_is_due_when_its_clock_reaches_an_end_and_else_never(kind: Any, data: Any) -> None:
    case = data.draw(kind())
    assert found(case) == expected(case)
