"""What a policy may say."""

import dataclasses
from datetime import timedelta
from pathlib import Path, PureWindowsPath

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
