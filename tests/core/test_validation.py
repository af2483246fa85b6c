"""Values that are taken: numbers of every library, durations, schedules of numbers, counts of a run."""

import json
from dataclasses import fields
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from tests.core.test_refusals import COUNTED

from drivetrain.core.int_schedule import IntSchedule, number_or_schedule, ramp
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.core.validation import count, duration, flag, number, one_of


def test_numbers_words_and_durations_are_taken_from_every_library() -> None:
    for value in (1, 1.0, np.float32(1), np.int64(1)):
        assert number("lr", value, above=0, at_most=1) == 1.0
        assert type(number("lr", value)) is float
    assert count("steps", np.int32(3)) == 3
    assert flag("fused", True) is True
    assert one_of("mode", "min", ("min", "max")) == "min"
    durations = (None, 2, np.int64(60), "2 minutes", timedelta(hours=1))
    assert [duration("hang_timeout", each) for each in durations] == [None, 2.0, 60.0, 120.0, 3600.0]


def test_a_schedule_is_written_as_intervals_and_each_number_holds_from_its_point_on() -> None:
    schedule = IntSchedule("steps", {"8 epochs": 1, 0: 8, "4 epochs": 4})
    assert (schedule.unit, schedule.first) == ("epochs", 8)
    assert [schedule.at(epoch) for epoch in (0, 3, 4, 7, 8, 100)] == [8, 8, 4, 4, 1, 1]
    assert [schedule.next_start(epoch) for epoch in (0, 3, 4, 8)] == [4, 4, 8, None]
    points: list[Any] = [(0, 10), ("0", "10 steps"), ("0 epochs", "10 steps"), (0, Every(10))]
    for start, point in points:
        schedule = IntSchedule("steps", {start: 2, point: 4})
        assert dict(schedule) == {0: 2, "10 steps": 4}
        assert IntSchedule("steps", schedule) == schedule
        assert str(schedule) == "2, 4 from 10 steps on"
    assert number_or_schedule("steps", 3) == number_or_schedule("steps", {0: 3}) == 3


def test_a_ramp_has_the_points_of_megatron_and_deepspeed() -> None:
    # Megatron: after each n-th part of the samples the batch grows by the increment.
    points = {0: 32, "100 samples": 64, "200 samples": 96, "300 samples": 128}
    assert ramp(32, 128, over="300 samples", by=32) == points
    # DeepSpeed, fixed_linear: floor(step / total x (max - min) + min), rounded down to a multiple.
    found = IntSchedule("length", ramp(64, 512, over=1000, by=64))
    for step in range(1200):
        exact = min(step, 1000) * (512 - 64) // 1000 + 64
        assert found.at(step) == exact - exact % 64
    # It may fall, and be faster than its unit.
    assert ramp(8, 2, over="3 epochs", by=2) == {0: 8, "1 epoch": 6, "2 epochs": 4, "3 epochs": 2}
    assert ramp(1, 5, over="2 epochs", by=1) == {0: 1, "1 epoch": 3, "2 epochs": 5}


def test_progress_comes_back_from_json_as_it_was() -> None:
    assert set(Progress().to_json().values()) == {0}
    restored, state = Progress(steps=99), COUNTED.to_json()
    restored.load_json(json.loads(json.dumps(state)))
    assert restored == COUNTED
    assert all(type(getattr(restored, f.name)) is type(getattr(COUNTED, f.name)) for f in fields(Progress))
    with pytest.raises(AttributeError):
        restored.step = 3  # type: ignore[attr-defined]
