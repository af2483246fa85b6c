"""Trials of Ray Tune and a fit inside Ray Train, on a local Ray: `make trackers` runs them."""

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
PROGRAMS = Path(__file__).with_name("programs")


def run_on_ray(name, *arguments, folder):
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**undisturbed(), "PYTHONPATH": paths}
    command = [sys.executable, str(PROGRAMS / name), *arguments, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(("[{", "[["))))


def on_ray(kind, tmp_path):
    found = run_on_ray("on_ray.py", kind, folder=tmp_path)
    assert all(each["error"] == "" and each["loss"] == pytest.approx(each["again"]) for each in found)
    return found


def noted(
    tmp_path,
):  # (process, rank, step, rate, weights) of a fit's start or of the end of one of its epochs
    return [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.real("waits for Ray's processes")
def test_asha_stops_the_worse_trials(tmp_path):
    steps = sorted(each["steps"] for each in on_ray("asha", tmp_path))
    assert steps[0] < steps[-1] == 16


@pytest.mark.nightly
@pytest.mark.real("waits for Ray's processes")
def test_population_based_training_restores_the_better_trial_and_goes_on_with_a_changed_rate(tmp_path):
    found = on_ray("pbt", tmp_path)
    (changed,) = {each["lr"] for each in found} - {0.2}
    assert changed > 1e-3  # the worse trial began with 1e-6
    assert [each["steps"] for each in found] == [12, 12]
    better = {step: weights for _, _, step, rate, weights in noted(tmp_path) if rate == 0.2}
    taken = {step: weights for _, _, step, rate, weights in noted(tmp_path) if rate == changed}
    assert taken.keys() == {8, 12}
    assert taken[8] == better[8]
    assert taken[12] != better[12]


@pytest.mark.nightly
@pytest.mark.real("waits for Ray's processes")
def test_a_fit_inside_ray_train_has_its_two_workers_as_ranks_and_reports_to_ray(tmp_path):
    (found,) = on_ray("train", tmp_path)
    assert found["steps"] == 4  # of 4 batches an epoch, each rank has two
    first, second = sorted(noted(tmp_path), key=lambda row: row[1])
    assert first[0] != second[0]
    assert [first[1], second[1]] == [0, 1]
    assert first[2:] == second[2:]


def test_trials_that_ray_cannot_run_are_refused():
    rows = {
        "no checkpoints": (
            lambda: trainable(Regression, [], trainer=quiet(max_epochs=1)),
            "checkpoint=False",
        ),
        "a directory": (lambda: trainable(Regression, [], trainer=quiet(run_dir="here")), "Leave it out"),
    }
    assert_refused(ConfigError, rows)


@pytest.mark.nightly
@pytest.mark.real("waits for Ray's processes")
def test_a_script_searches_over_ray_and_a_trial_goes_on_with_anothers_weights(tmp_path):
    best, ends, folders, again = run_on_ray("script_on_ray.py", folder=tmp_path)
    run_id, objective, chosen = best
    assert objective == ends[run_id] == min(ends.values())
    assert again == pytest.approx(objective)  # with the weights of the trial's checkpoint
    assert len(ends) == 2
    assert chosen["learning_rate"] >= 5e-3
    rows = noted(tmp_path)
    assert all(row[2] == row[3]["learning_rate"] for row in rows)
    ((changed, name),) = {(row[2], row[0]) for row in rows} - {(1e-6, "rate 1e-06"), (1e-2, "rate 0.01")}
    assert name == f"rate {changed:.6g}"
    assert [row[1] for row in rows if row[2] == changed] == [6]  # after step 4 of the better trial
    assert sorted(folders) == sorted(["rate 0.01", "rate 0.01-2", "rate 1e-06", name])
