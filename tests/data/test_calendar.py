"""The calendar of a fit, against a run that is counted window by window."""

import math
from typing import Any, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from drivetrain.core.calendar import Calendar, RunLength, RunPosition
from drivetrain.core.int_schedule import IntSchedule
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress

CONSTANT = IntSchedule("n", 1)


class Counted(NamedTuple):  # one window of a run that is counted one by one
    start: RunPosition
    sizes: list[int]


def counted(epochs: int, windows: Calendar, samples: int, shards: int, limit: Any, drop_last: bool) -> Any:
    """The windows of each epoch, as each round takes its samples from the order."""
    found: list[list[Counted]] = []
    number = seen = 0
    for epoch in range(epochs):
        position = rounds = 0
        found.append([])
        while True:
            done = {"steps": number, "epochs": epoch, "samples": seen}
            start, sizes = RunPosition(epoch, position, rounds, number, seen), []
            size = windows.batch_size.at(done[windows.batch_size.unit])
            for _ in range(windows.batches.at(done[windows.batches.unit])):
                left = samples - position
                taken = min(size * shards, left - left % size if drop_last else left)
                if not taken or rounds == limit:
                    break
                # A round that lacks samples is the last.
                position = position + taken if taken == size * shards else samples
                rounds, seen, sizes = rounds + 1, seen + taken, [*sizes, size]
            if not sizes:
                break
            found[-1].append(Counted(start, sizes))
            number += 1
    return found


def points() -> Any:
    unit = st.sampled_from(["steps", "epochs", "samples"])
    later = st.dictionaries(st.integers(1, 60), st.integers(1, 5), max_size=4)
    return st.builds(
        lambda first, later, unit: IntSchedule(
            "n", {0: first} | {f"{at} {unit}": n for at, n in later.items()}
        ),
        st.integers(1, 5),
        later,
        unit,
    )


@example(CONSTANT, IntSchedule("n", {0: 2, 1: 4}), 5, 1, None, True, 1)  # the rest fills no batch of 4
@example(CONSTANT, IntSchedule("n", {0: 4, 1: 1}), 6, 2, None, True, 1)  # a short round is the last
@given(
    batches=points(), sizes=points(), samples=st.integers(1, 40), shards=st.integers(1, 3),
    limit=st.none() | st.integers(1, 6), drop_last=st.booleans(), epochs=st.integers(1, 8),
)  # fmt: skip
def test_positions_and_lengths_are_those_of_a_run_counted_one_by_one(
    batches: Any, sizes: Any, samples: int, shards: int, limit: Any, drop_last: bool, epochs: int
) -> None:
    calendar = Calendar(batches, sizes, length=samples, shards=shards, limit=limit, drop_last=drop_last)
    walked = counted(epochs + 1, calendar, samples, shards, limit, drop_last)
    windows = [each for epoch in walked[:epochs] for each in epoch]
    assert calendar.windows_before(epochs) == len(windows)
    for number, each in enumerate(windows):
        assert calendar.after(number) == each.start
    limited = RunLength(max_steps=1 + len(windows) // 2, calendar=calendar)
    last = windows[len(windows) // 2].start.epoch + 1 if windows else 0
    for epoch, own in enumerate(walked[:epochs]):
        assert calendar.windows_in(epoch) == len(own)
        assert calendar.rounds_in(epoch) == sum(len(each.sizes) for each in own)
        half = sum(map(len, walked[:epoch])) + math.ceil(len(own) / 2)
        assert calendar.step_of(Every(epoch + 0.5, "epochs")) == half
        for number, each in enumerate(own):  # as a run that is resumed there
            rest, calendar.begun = own[number:], each.start
            expected = [(len(other.sizes), other is own[-1]) for other in rest]
            assert list(calendar.windows()) == expected
            assert list(calendar.batch_sizes(epoch)) == [size for other in rest for size in other.sizes]
            # Workers prepare it before its epoch begins.
            ahead = [size for other in walked[epoch + 1] for size in other.sizes]
            assert list(calendar.batch_sizes(epoch + 1)) == ahead
            progress = Progress(steps=each.start.windows, epoch=epoch, epoch_steps=number)
            assert limited.epochs_until(progress) == last or epoch >= last
