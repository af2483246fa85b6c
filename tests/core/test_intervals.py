"""Intervals: how they are written, when they are due, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from drivetrain import ConfigError
from drivetrain.core.intervals import DelayedTrigger, Every, FirstUpdateTrigger, Trigger
from drivetrain.core.progress import Progress

# How intervals are written.


@pytest.mark.parametrize(
    ("spec", "amount", "unit"),
    [
        (500, 500, "steps"),
        ("500", 500, "steps"),
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("3 updates", 3, "steps"),
        ("1 epoch", 1, "epochs"),
        ("epoch", 1, "epochs"),
        ("2 Epochs", 2, "epochs"),
        ("0.25 epochs", 0.25, "epochs"),
        (".5epochs", 0.5, "epochs"),
        ("10 minutes", 10, "minutes"),
        ("1.5 hours", 1.5, "hours"),
        (timedelta(minutes=2), 120, "seconds"),
        ("1_000_000 tokens", 1_000_000, "tokens"),
        ("1e6 tokens", 1_000_000, "tokens"),
        ("2.5e3 samples", 2500, "samples"),
        (Every("3 epochs"), 3, "epochs"),
        ("  7  steps ", 7, "steps"),
    ],
)
def test_an_interval_may_be_written_in_many_ways(spec: Any, amount: float, unit: str) -> None:
    every = Every(spec)
    assert (every.amount, every.unit) == (amount, unit)


def test_amount_and_unit_may_be_given_apart() -> None:
    assert Every(2, "epochs") == Every("2 epoch")
    assert Every(0.5, "hour") == Every("0.5 hours")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "is not an interval"),
        ("_ steps", "is not an interval"),
        ("1__0 steps", "is not an interval"),
        ("-3 steps", "is not an interval"),
        ("1 2 steps", "is not an interval"),
        (None, "is not an interval"),
        (True, "is not an interval"),
        ([3], "is not an interval"),
        ("3 epocs", r"unknown unit 'epocs' in the interval '3 epocs'. Did you mean 'epochs'\?"),
        ("5 min", "Did you mean 'minutes'"),
        (0, "must be positive"),
        (-1, "must be positive"),
        ("0 epochs", "must be positive"),
        (float("nan"), "must be positive"),
        (float("inf"), "must be positive"),
        ("1e999 steps", "must be positive"),
        (timedelta(0), "must be positive"),
        ("1.5 steps", "not a whole number of steps"),
        (2.5, "not a whole number of steps"),
        ("0.5 tokens", "not a whole number of tokens"),
    ],
)
def test_what_is_no_interval_is_refused_with_what_to_write(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Every(spec)


@pytest.mark.parametrize("amount", ["3", "3 steps", None, True, Every(3)])
def test_an_amount_beside_a_unit_must_be_a_number(amount: Any) -> None:
    with pytest.raises(ConfigError, match="takes a number and a unit"):
        Every(amount, "epochs")


@pytest.mark.parametrize(
    "every",
    [Every(1), Every("0.1 epochs"), Every("1234567.25 seconds"), Every("1e12 tokens"), Every(1e-7, "hours")],
    ids=str,
)
def test_the_text_of_an_interval_says_all_of_it(every: Every) -> None:
    assert Every(str(every)) == every
    assert pickle.loads(pickle.dumps(every)) == copy.deepcopy(every) == every


def test_the_text_of_an_interval_is_what_a_user_would_write() -> None:
    assert [str(Every(each)) for each in (1, 500, "1_000_000 tokens", "0.25 epochs")] == [
        "1 step",
        "500 steps",
        "1000000 tokens",
        "0.25 epochs",
    ]


def test_times_are_told_in_seconds_and_counts_are_not_times() -> None:
    assert Every("2 minutes").seconds == 120
    assert Every("1 hour").seconds == 3600
    assert Every("2 epochs").seconds is None


# When they are due.


def updates(
    per_epoch: int, epochs: int, skipped: frozenset[int] = frozenset(), start: int = 0
) -> Iterator[tuple[int, Progress, bool]]:
    """The progress after each window of a run, numbered from 1, each of two samples, five tokens and a
    second; those in `skipped` make no update. Those up to `start` are passed over.
    """
    progress = Progress()
    for window in range(1, per_epoch * epochs + 1):
        progress.samples += 2
        progress.tokens += 5
        progress.seconds += 1.0
        if window not in skipped:
            progress.updates += 1
            progress.epoch_updates += 1
        ended = window % per_epoch == 0
        progress.epoch += ended
        if window > start:
            yield window, progress, ended
        if ended:
            progress.epoch_updates = 0


def due_at(every: Any, per_epoch: int = 5, epochs: int = 2, **options: Any) -> list[int]:
    """The windows after which an interval is due."""
    trigger = Trigger(None if every is None else Every(every), per_epoch)
    return [window for window, *state in updates(per_epoch, epochs, **options) if trigger.due(*state)]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, []),
        (3, [3, 6, 9]),
        ("1 epoch", [5, 10]),
        ("2 epochs", [10]),
        ("7 samples", [4, 7]),
        ("20 tokens", [4, 8]),
        ("4 seconds", [4, 8]),
        ("0.05 minutes", [3, 6, 9]),
        ("1 sample", list(range(1, 11))),
    ],
)
def test_an_interval_is_due_when_its_units_have_passed(every: Any, expected: list[int]) -> None:
    assert due_at(every) == expected


@pytest.mark.parametrize(
    ("part", "per_epoch", "expected"),
    [
        ("0.25 epochs", 8, [2, 4, 6, 8]),
        ("0.5 epochs", 5, [3, 5]),
        ("0.25 epochs", 10, [3, 5, 8, 10]),
        ("0.3 epochs", 10, [3, 6, 9]),
        (Every(1 / 3, "epochs"), 9, [3, 6, 9]),
        (Every(5 / 6, "epochs"), 6, [5]),
        ("0.01 epochs", 4, [1, 2, 3, 4]),
    ],
)
def test_a_part_of_an_epoch_is_due_that_often_in_every_epoch(
    part: Any, per_epoch: int, expected: list[int]
) -> None:
    assert due_at(part, per_epoch, 1) == expected
    assert due_at(part, per_epoch, 2) == expected + [per_epoch + each for each in expected]


def test_what_was_due_is_not_due_again_when_an_update_is_skipped() -> None:
    assert due_at(2, per_epoch=8, epochs=1, skipped=frozenset({1, 4, 5})) == [3, 7]
    assert due_at("0.5 epochs", per_epoch=5, skipped=frozenset({4, 6, 7})) == [3, 5, 10]
    assert due_at("0.4 epochs", per_epoch=5, skipped=frozenset({6})) == [2, 4, 8, 10]


def test_nothing_is_due_before_the_first_update() -> None:
    assert due_at(3, per_epoch=5, epochs=1, skipped=frozenset({1, 2})) == [5]
    assert due_at("0.5 epochs", per_epoch=5, epochs=1, skipped=frozenset({1, 2, 3})) == [5]


@pytest.mark.parametrize("every", [3, "1 epoch", "0.25 epochs", "7 samples", "20 tokens", "4 seconds"])
@pytest.mark.parametrize("restart", range(1, 16))
def test_a_restart_moves_nothing(every: Any, restart: int) -> None:
    whole = due_at(every, per_epoch=8, epochs=2)
    before = [window for window in whole if window <= restart]
    trigger = Trigger(Every(every), 8)
    for window, progress, _ in updates(8, 2):
        if window == restart:
            trigger.start(progress)
            break
    after = [window for window, *state in updates(8, 2, start=restart) if trigger.due(*state)]
    assert before + after == whole


@pytest.mark.parametrize("every", [3, "0.25 epochs"])
def test_what_was_due_before_a_restart_is_not_due_again_when_an_update_is_skipped(every: Any) -> None:
    trigger = Trigger(Every(every), 12)
    trigger.start(Progress(updates=3, epoch_updates=3, micro_batches=3))
    assert not trigger.due(Progress(updates=3, epoch_updates=3, micro_batches=4, skipped=1), False)
    assert trigger.due(Progress(updates=6, epoch_updates=6, micro_batches=7, skipped=1), False)


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        ("7 steps", [8, 10]),
        ("8 steps", [8, 10]),
        ("1 epoch", [6, 8, 10]),
        ("1.5 epochs", [8, 10]),
        ("13 samples", [8, 10]),
        ("9 seconds", [10]),
        ("3 epochs", []),
    ],
)
def test_nothing_is_due_before_the_point_at_which_a_delayed_trigger_begins(
    begins: str, expected: list[int]
) -> None:
    trigger = DelayedTrigger(Every(2), Every(begins), 5)
    assert [window for window, *state in updates(5, 2) if trigger.due(*state)] == expected


def test_the_end_of_an_epoch_is_the_point_at_which_the_next_begins() -> None:
    trigger = DelayedTrigger(Every("1 epoch"), Every("2 epochs"), None)
    assert [window for window, *state in updates(5, 3) if trigger.due(*state)] == [10, 15]


@pytest.mark.parametrize(
    ("every", "expected"), [(3, [1, 3]), ("1 step", [1, 2, 3, 4, 5]), ("1 epoch", [1, 5])]
)
def test_the_first_update_is_due_once(every: Any, expected: list[int]) -> None:
    trigger = FirstUpdateTrigger(Every(every), 5)
    assert [window for window, *state in updates(5, 1) if trigger.due(*state)] == expected
    trigger = FirstUpdateTrigger(Every(4), 5)
    skipped = [window for window, *state in updates(5, 1, frozenset({1, 3})) if trigger.due(*state)]
    assert skipped == [2]
    trigger = FirstUpdateTrigger(Every(4), 5)
    trigger.start(Progress(updates=1, epoch_updates=1))
    assert not trigger.due(Progress(updates=1, epoch_updates=1, skipped=1), False)


def test_a_part_of_an_epoch_needs_a_known_length() -> None:
    with pytest.raises(ConfigError, match=r"0\.5 epochs needs data of known length"):
        Trigger(Every("0.5 epochs"), None)
    with pytest.raises(ConfigError, match=r"1\.5 epochs needs whole epochs"):
        Trigger(Every("1.5 epochs"), 10)
    with pytest.raises(ConfigError, match=r"1\.5 epochs from the start need data of known length"):
        DelayedTrigger(Every(2), Every("1.5 epochs"), None)
    assert not Trigger(Every("2 epochs"), None).due(Progress(epoch=1), True)
