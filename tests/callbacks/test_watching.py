"""Callbacks that watch change no number; tests/gpu/test_waits.py shows that none waits for the device."""

from pathlib import Path

from tests.support.outcome import weights
from tests.support.tasks import quiet
from tests.support.waits import WATCH, Language, batches

from drivetrain import CheckpointConfig
from drivetrain.callbacks import Callback


def fitted(directory: Path, *callbacks: Callback) -> dict[str, object]:
    policy = CheckpointConfig(every="20 steps", best=0, by=None)
    options = {"log_every": "9 steps", "loggers": "jsonl", "checkpoint": policy, "callbacks": callbacks}
    quiet(max_epochs=1, run_dir=directory, **options).fit(task := Language(), batches(20))
    return weights(task)


def test_callbacks_that_watch_change_no_number(tmp_path: Path) -> None:
    plain = fitted(tmp_path / "plain")
    for name, make in WATCH.items():
        assert fitted(tmp_path / name, make()) == plain, name
