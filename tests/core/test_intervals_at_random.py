"""When an interval is due: random runs in every unit, with restarts, against one rule for all of them.

An interval has ends on a clock of its unit. After an update, and when an epoch ends, the run asks whether the
interval is due: it is if the clock has reached an end since the run asked before. Nothing else, such as a
restart, makes it due or keeps it from being due.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.core.intervals import Every, Trigger
from drivetrain.core.progress import Progress


@dataclass(frozen=True)
class Window:
    """What one window of micro-batches adds to the counts.

    Attributes:
        applied: Whether it made an update.
        last: Whether its epoch ends with it.
        restarts: Whether the run is killed after it, and goes on from here.
    """

    applied: bool
    samples: int
    tokens: int
    seconds: float
    last: bool
    restarts: bool

    @property
    def is_asked(self) -> bool:
        """Whether the run asks after it what is due."""
        return self.applied or self.last


@dataclass(frozen=True)
class Case:
    """A run and an interval.

    Attributes:
        every: The interval.
        windows: What the run trains on.
        per_epoch: Windows in an epoch; needed for parts of one only.
        is_saver: Whether it is asked after the run has closed an epoch, as savers are, or before.
    """

    every: Every
    windows: tuple[Window, ...]
    per_epoch: int | None
    is_saver: bool


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
    clock, epoch, updates = [], 0, 0
    for window in case.windows:
        updates += window.applied
        clock.append(epoch + (Fraction(1) if window.last else Fraction(updates, case.per_epoch)))
        if window.last:
            epoch, updates = epoch + 1, 0
    return [start + number * part for start in range(epoch) for number in range(1, int(1 / part) + 1)], clock


def expected(case: Case) -> list[int]:
    """The windows after which the interval is due, by the rule."""
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
    trigger, progress, due = Trigger(case.every, case.per_epoch), Progress(), []
    for number, window in enumerate(case.windows):
        progress.samples += window.samples
        progress.tokens += window.tokens
        progress.seconds += window.seconds
        progress.updates += window.applied
        progress.epoch_updates += window.applied
        progress.epoch += window.last
        is_due = not case.is_saver and window.is_asked and trigger.due(progress, window.last)
        if window.last:
            progress.epoch_updates = 0
        is_due |= case.is_saver and window.is_asked and trigger.due(progress, window.last)
        if is_due:
            due.append(number)
        if window.restarts and window.is_asked:
            stored, progress = progress.to_json(), Progress()
            progress.load_json(dict(stored))
            trigger = Trigger(case.every, case.per_epoch)
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


def windows(epochs: list[int], skips: bool) -> st.SearchStrategy[tuple[Window, ...]]:
    """Epochs of these lengths."""
    return st.tuples(
        *(
            st.builds(
                Window,
                applied=st.sampled_from([True, True, False]) if skips else st.just(True),
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
    """Runs whose epochs differ in length, some windows of which make no update."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return Case(draw(INTERVALS), draw(windows(lengths, skips=True)), None, draw(st.booleans()))


@st.composite
def cases_of_parts(draw: st.DrawFn) -> Case:
    """Runs whose epochs are alike, and an interval that is a part of one."""
    length, epochs = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    whole_updates = st.builds(Fraction, st.integers(1, length - 1), st.just(length)) if length > 1 else PARTS
    every = Every(float(draw(PARTS | whole_updates)), "epochs")
    return Case(every, draw(windows([length] * epochs, skips=True)), length, draw(st.booleans()))


exact = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@exact
@given(cases())
def test_an_interval_is_due_when_its_clock_reaches_an_end_and_at_no_other_time(case: Case) -> None:
    assert found(case) == expected(case)


@exact
@given(cases_of_parts())
def test_a_part_of_an_epoch_is_due_when_its_clock_reaches_an_end_and_at_no_other_time(case: Case) -> None:
    assert found(case) == expected(case)
