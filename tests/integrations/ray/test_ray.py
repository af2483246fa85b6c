"""Trials of Ray Tune on a local Ray; they run where Ray is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.forked import undisturbed
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, quiet

from drivetrain.core.errors import ConfigError
from drivetrain.core.registry import is_installed
from drivetrain.integrations.ray import trainable

pytestmark = pytest.mark.skipif(not is_installed("ray"), reason="the extra ray is not installed")

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("programs") / "on_ray.py"


def on_ray(kind, tmp_path):
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**undisturbed(), "PYTHONPATH": paths}
    command = [sys.executable, str(PROGRAM), kind, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    assert all(each["error"] == "" and each["loss"] == pytest.approx(each["again"]) for each in found)
    return found


@pytest.mark.nightly
def test_asha_stops_the_worse_trials(tmp_path):
    steps = sorted(each["steps"] for each in on_ray("asha", tmp_path))
    assert steps[0] < steps[-1] == 16


def test_trials_that_ray_cannot_run_are_refused():
    rows = {
        "no checkpoints": (
            lambda: trainable(Regression, [], trainer=quiet(max_epochs=1)),
            "checkpoint=False",
        ),
        "a directory": (lambda: trainable(Regression, [], trainer=quiet(run_dir="here")), "Leave it out"),
    }
    assert_refused(ConfigError, rows)
