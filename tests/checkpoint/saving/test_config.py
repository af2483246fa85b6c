"""A policy that cannot work is refused where it is written."""

import copy
import dataclasses
import math
import pickle
from datetime import timedelta
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every


def test_the_defaults_are_those_of_the_design():
    config = CheckpointConfig()
    assert dataclasses.astuple(config)[1:] == (
        2,
        None,
        "validation/loss",
        "min",
        False,
        None,
        None,
        True,
        None,
    )
    assert config.interval == Every("1 epoch")


@pytest.mark.parametrize(
    ("every", "interval"),
    [
        (500, Every("500 steps")),
        ("0.5 epochs", Every(0.5, "epochs")),
        ("10 minutes", Every(10, "minutes")),
        (timedelta(hours=1), Every(3600, "seconds")),
        ("2000 samples", Every(2000, "samples")),
        ("1e6 tokens", Every(1_000_000, "tokens")),
        (Every("3 hours"), Every(3, "hours")),
    ],
)
def test_an_interval_may_be_written_in_any_unit(every, interval):
    assert CheckpointConfig(every=every).interval == interval


def test_no_interval_saves_only_at_the_end():
    assert CheckpointConfig(every=None).interval is None


def test_no_metric_means_no_keepers():
    assert CheckpointConfig(by=None, best=3).keepers == 0


def test_policies_that_say_the_same_are_equal_copied_or_not():
    config = CheckpointConfig(every="1 epoch", best=np.int64(3), keep_last=4)
    assert config == CheckpointConfig(every=Every(1, "epochs"), best=3, keep_last=4)
    assert type(config.best) is int
    assert (
        pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    )
    assert dataclasses.replace(config, mode="max") != config


def test_a_policy_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointConfig().best = 2


@pytest.mark.parametrize(
    "directory",
    [
        None,
        "runs/one",
        Path("runs/one"),
        "s3://bucket/run",
        "s3:/bucket",
        PureWindowsPath("C:/run"),
        Path("."),
    ],
)
def test_checkpoints_may_go_to_a_path_or_an_address(directory):
    assert CheckpointConfig(directory=directory).directory == directory


@settings(deadline=None, derandomize=True, database=None)
@given(st.floats(), st.floats(), st.sampled_from(["min", "max"]))
def test_of_two_values_at_most_one_is_better_and_nan_never_is(value, other, mode):
    config = CheckpointConfig(mode=mode)
    better, worse = config.is_better(value, other), config.is_better(other, value)
    if math.isnan(value) or math.isnan(other) or value == other:
        assert not better
        assert not worse
    else:
        assert (better, worse) == (
            (value < other, other < value) if mode == "min" else (other < value, value < other)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "minimum"}, "unknown CheckpointConfig mode 'minimum'. Did you mean 'min'"),
        ({"mode": ["min"]}, r"unknown CheckpointConfig mode \['min'\]. .*Allowed: 'max', 'min'"),
        ({"mode": None}, "unknown CheckpointConfig mode None"),
        ({"keep_last": -1}, "CheckpointConfig: keep_last must be a whole number, at least 0, not -1"),
        ({"keep_last": "2"}, "keep_last must be a whole number, at least 0, not '2'"),
        ({"best": 1.5}, "CheckpointConfig: best must be a whole number"),
        ({"best": math.inf}, "best must be a whole number"),
        ({"best": True}, "best must be a whole number"),
        ({"every": "1 fortnight"}, "unknown unit 'fortnight'"),
        ({"every": 0}, "must be positive"),
        ({"every": 2.5}, "not a whole number of steps"),
        ({"every": True}, "True is not an interval"),
        ({"by": ""}, "by must be a metric's name"),
        ({"by": 3}, "by must be a metric's name"),
        (
            {"parameters": "trained"},
            "unknown CheckpointConfig parameters 'trained'. Did you mean 'trainable'",
        ),
        ({"asynchronous": 1}, "asynchronous must be True or False, not 1"),
        ({"directory": ""}, "directory must be a path, an address, or None; not ''"),
        ({"directory": 3}, "directory must be a path, an address, or None; not 3"),
        ({"directory": b"runs"}, "directory must be a path, an address, or None; not b'runs'"),
        (
            {"directory": PurePosixPath("s3://bucket/run")},
            "not an address, because a Path keeps only one",
        ),
        ({"directory": PureWindowsPath("gs://bucket/run")}, "text, such as 's3://bucket/run'"),
    ],
)
def test_a_wrong_value_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**arguments)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("monitor", "by"), ("save_top_k", "best"), ("dirpath", "directory"), ("save_total_limit", "keep_last")],
)
def test_the_names_of_other_libraries_are_answered_with_ours(name, ours):
    with pytest.raises(ConfigError, match=f"no argument '{name}'. Here it is called '{ours}'"):
        CheckpointConfig(**{name: 1})


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no argument 'keep_lst'\. Did you mean 'keep_last'"):
        CheckpointConfig(keep_lst=3)
