"""Numbers by stages of a run: how they are written, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import ConfigError, Every, ramp
from drivetrain.core.stages import Stages, stages_or_number


def test_each_number_holds_from_its_point_on() -> None:
    stages = Stages("steps", {"8 epochs": 1, 0: 8, "4 epochs": 4})
    assert stages.unit == "epochs"
    assert [stages.at(epoch) for epoch in (0, 3, 4, 7, 8, 100)] == [8, 8, 4, 4, 1, 1]
    assert [stages.next_start(epoch) for epoch in (0, 3, 4, 8)] == [4, 4, 8, None]
    assert (stages.most, stages.first) == (8, 8)


@pytest.mark.parametrize("points", [(0, 10), ("0", "10 steps"), ("0 epochs", "10 updates"), (0, Every(10))])
def test_points_are_written_as_intervals_are(points: tuple[Any, Any]) -> None:
    stages = Stages("steps", dict(zip(points, (2, 4), strict=True)))
    assert dict(stages) == {0: 2, "10 steps": 4}
    assert Stages("steps", stages) == stages
    assert str(stages) == "2, 4 from 10 steps on"


def test_one_number_is_no_schedule() -> None:
    assert stages_or_number("steps", 3) == stages_or_number("steps", {0: 3}) == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "empty mapping"),
        ({"2 epochs": 4}, "no number for the start"),
        ({0: 4, "2 epochs": 8, "100 steps": 2}, "different units"),
        ({0: 4, "2 minutes": 8}, "steps, whole epochs, or samples"),
        ({0: 4, "100 tokens": 8}, "steps, whole epochs, or samples"),
        ({0: 4, "0.5 epochs": 8}, "steps, whole epochs, or samples"),
        ({0: 4, 5: 8, "5 steps": 2}, "two numbers for the point '5 steps'"),
        ({0: 4, "2 epochs": 0}, "from '2 epochs' on must be a whole number, at least 1"),
        ({0: 4, "2 apples": 8}, "unknown unit 'apples'"),
        ({0: 4, -1: 8}, "must be positive"),
        ({False: 4}, "not an interval"),
        (2.5, "must be a whole number"),
        (True, "must be a whole number"),
    ],
)
def test_what_is_not_allowed_is_named(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Stages("steps", given)


def test_a_ramp_has_the_points_of_megatron_and_deepspeed() -> None:
    # Megatron: after each n-th part of the samples the batch grows by the increment.
    assert ramp(32, 128, over="300 samples", by=32) == {
        0: 32,
        "100 samples": 64,
        "200 samples": 96,
        "300 samples": 128,
    }
    # DeepSpeed, fixed_linear: floor(step / total x (max - min) + min), rounded down to a multiple.
    found = Stages("length", ramp(64, 512, over=1000, by=64))
    for step in range(1200):
        exact = min(step, 1000) * (512 - 64) // 1000 + 64
        assert found.at(step) == exact - exact % 64


def test_a_ramp_may_fall_and_be_faster_than_its_unit() -> None:
    assert ramp(8, 2, over="3 epochs", by=2) == {0: 8, "1 epoch": 6, "2 epochs": 4, "3 epochs": 2}
    assert ramp(1, 5, over="2 epochs", by=1) == {0: 1, "1 epoch": 3, "2 epochs": 5}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"first": 8, "last": 30, "over": 10, "by": 4}, "30 is not reached from 8 in steps of 4"),
        ({"first": 8, "last": 8, "over": 10, "by": 4}, "are equal"),
        ({"first": 8, "last": 16, "over": "1 hour", "by": 4}, "steps, whole epochs, or samples"),
        ({"first": 8, "last": 16, "over": 10, "by": 0}, "by must be a whole number, at least 1"),
    ],
)
def test_a_ramp_that_cannot_be_made_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ramp(**arguments)
