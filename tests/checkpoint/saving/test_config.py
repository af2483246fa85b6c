"""What a policy may say."""

import copy
import dataclasses
import pickle
from datetime import timedelta
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.core.intervals import Every


def test_the_defaults_are_those_of_the_design():
    expected = (2, None, "validation/loss", "min", False, None, None, True, None)
    assert dataclasses.astuple(CheckpointConfig())[1:] == expected
    assert CheckpointConfig().interval == Every("1 epoch")
    assert CheckpointConfig(every=None).interval is None
    assert CheckpointConfig(by=None, best=3).keepers == 0
    for every, interval in (
        (500, Every("500 steps")),
        ("10 minutes", Every(10, "minutes")),
        (timedelta(hours=1), Every(3600, "seconds")),
        (Every("3 hours"), Every(3, "hours")),
    ):
        assert CheckpointConfig(every=every).interval == interval
    for place in (Path("runs/one"), "s3://bucket/run", "s3:/bucket", PureWindowsPath("C:/run"), Path(".")):
        assert CheckpointConfig(directory=place).directory == place


def test_policies_that_say_the_same_are_equal_copied_or_not_and_do_not_change():
    config = CheckpointConfig(every="1 epoch", best=np.int64(3), keep_last=4)
    assert config == CheckpointConfig(every=Every(1, "epochs"), best=3, keep_last=4)
    assert type(config.best) is int
    assert (
        pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    )
    assert dataclasses.replace(config, mode="max") != config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.best = 2
