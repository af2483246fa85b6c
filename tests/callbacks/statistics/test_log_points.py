"""Statistics are taken at log points by their interval, the same after a resume, and change no number."""

from __future__ import annotations

import json

import pytest
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from tests.support.waits import WATCH, Language, batches

from drivetrain import CheckpointConfig, LearningRateMonitor, OptimizerConfig
from drivetrain.callbacks import DeviceStats


def test_every_takes_the_first_log_point_at_or_after_its_end_also_after_a_resume(tmp_path):
    def taken(folder, resume=None, every="5 steps", **more):
        options = {"loggers": "jsonl", "checkpoint": True, "run_dir": tmp_path / folder, **more}
        quiet(**options, callbacks=[DeviceStats(every=every)]).fit(Regression(), pairs(), resume=resume)
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(each)["step"] for each in lines if "device/" in each]

    for every, steps in ((None, [2, 4, 6, 8, 10]), ("3 steps", [4, 6, 10]), ("1 epoch", [6, 10])):
        assert taken(str(every), every=every, max_epochs=2, log_every="2 steps") == steps
    more = {"log_every": "3 steps"}
    assert taken("straight", max_steps=15, **more) == [6, 12, 15]
    for done in (6, 9):
        taken(str(done), max_steps=done, **more)
        assert taken(str(done), "auto", max_steps=15, **more) == [6, 12, 15]


def fitted(directory, *callbacks):
    policy = CheckpointConfig(every="20 steps", best=0, by=None)
    options = {"log_every": "9 steps", "loggers": "jsonl", "checkpoint": policy, "callbacks": callbacks}
    quiet(max_epochs=1, run_dir=directory, **options).fit(task := Language(), batches(20))
    return weights(task)


def test_callbacks_that_watch_change_no_number(tmp_path):
    plain = fitted(tmp_path / "plain")
    for name, make in WATCH.items():
        assert fitted(tmp_path / name, make()) == plain, name


def test_a_log_point_has_the_rates_that_its_step_used() -> None:
    task = Regression(OptimizerConfig("sgd", lr=0.4, schedule="linear"))
    result = quiet(callbacks=[LearningRateMonitor()], max_epochs=2).fit(task, pairs(4, 2), pairs(2, 2))
    assert result.metrics["lr"] == pytest.approx(0.1)  # of the last of four steps; 0 would be a fifth's
