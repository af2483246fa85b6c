"""Statistics are taken at log points by their interval, the same after a resume, and change no number."""

import json

import pytest
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from tests.support.waits import WATCH, Language, batches

from drivetrain import CheckpointConfig
from drivetrain.callbacks import DeviceStats, WeightHistograms


@pytest.mark.parametrize(
    ("kind", "name"),
    [(WeightHistograms, "histograms"), (DeviceStats, "device/")],
)
def test_every_takes_the_first_log_point_at_or_after_its_end_also_after_a_resume(kind, name, tmp_path):
    options = {"loggers": "jsonl", "checkpoint": True}

    def taken(folder, resume=None, every="5 steps", **more):
        callbacks = [kind(every=every)]
        trainer = quiet(**options, run_dir=tmp_path / folder, callbacks=callbacks, **more)
        trainer.fit(Regression(), pairs(), resume=resume)
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        lines = [each for each in lines if name in each]
        return [json.loads(each)["step"] for each in lines], [] if kind is DeviceStats else lines

    for every, steps in ((None, [2, 4, 6, 8, 10]), ("3 steps", [4, 6, 10]), ("1 epoch", [6, 10])):
        assert taken(str(every), every=every, max_epochs=2, log_every="2 steps")[0] == steps
    more = {"log_every": "3 steps"}
    straight = taken("straight", max_steps=15, **more)
    assert straight[0] == [6, 12, 15]
    for done in (6, 9):
        taken(str(done), max_steps=done, **more)
        assert taken(str(done), "auto", max_steps=15, **more) == straight


def fitted(directory, *callbacks):
    policy = CheckpointConfig(every="20 steps", best=0, by=None)
    options = {"log_every": "9 steps", "loggers": "jsonl", "checkpoint": policy, "callbacks": callbacks}
    quiet(max_epochs=1, run_dir=directory, **options).fit(task := Language(), batches(20))
    return weights(task)


def test_callbacks_that_watch_change_no_number(tmp_path):
    plain = fitted(tmp_path / "plain")
    for name, make in WATCH.items():
        assert fitted(tmp_path / name, make()) == plain, name
