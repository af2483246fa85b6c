"""A policy that cannot work is refused where it is written."""

import dataclasses
from datetime import timedelta

import pytest

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.errors import ConfigError
from drivetrain.types import Every


def test_the_defaults_are_those_of_the_design():
    config = CheckpointConfig()
    assert dataclasses.astuple(config)[1:] == (2, 1, "validation/loss", "min", False, None)
    assert config.interval == Every("1 epoch")


@pytest.mark.parametrize(
    ("every", "interval"),
    [
        (500, Every("500 steps")),
        ("10 minutes", Every(10, "minutes")),
        (timedelta(hours=1), Every(3600, "seconds")),
    ],
)
def test_an_interval_may_be_written_in_any_unit(every, interval):
    assert CheckpointConfig(every=every).interval == interval


def test_no_interval_saves_only_at_the_end():
    assert CheckpointConfig(every=None).interval is None


def test_no_metric_means_no_keepers():
    assert CheckpointConfig(by=None, best=3).keepers == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "minimum"}, "unknown mode 'minimum'. Did you mean 'min'"),
        ({"keep_last": -1}, "keep_last must be a whole number from 0 on, not -1"),
        ({"best": 1.5}, "best must be a whole number"),
        ({"best": True}, "best must be a whole number"),
        ({"every": "1 fortnight"}, "unknown unit 'fortnight'"),
        ({"every": 0}, "must be positive"),
        ({"by": ""}, "by must be a metric's name"),
        ({"by": 3}, "by must be a metric's name"),
        ({"asynchronous": 1}, "must be True or False"),
    ],
)
def test_a_wrong_value_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**arguments)
