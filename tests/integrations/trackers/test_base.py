"""What all trackers do alike: with a tracker that writes to a file, and refuses while another file exists."""

import json
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests.support.messages import heard, warned
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.core.errors import ConfigError, MissingDependencyError
from drivetrain.integrations.trackers import Tracker

STORE, DOWN = Path("store.jsonl"), Path("down")


class FileTracker(Tracker):
    title, package, extra, advice = "The tracker", "json", "file", "Start it"
    patience = 0.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.refused = threading.Event()

    def _open(self, resumed: str | None, config: Any) -> str:
        self._check()
        STORE.touch()
        Path("opened").write_text(json.dumps([sys.argv, config]))
        return resumed or "new"

    def _check(self) -> None:
        if DOWN.exists():
            self.refused.set()
            raise ConnectionError(f"it is down{DOWN.read_text()}.")

    def _stored_until(self) -> int:
        return max((json.loads(line)[0] for line in STORE.read_text().splitlines()), default=-1)

    def _send(self, record: Any) -> None:
        self._check()
        with STORE.open("a") as file:
            file.write(json.dumps([record.step, record.values]) + "\n")

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        self._check()
        with Path("stored").open("a") as file:
            file.write(f"{name} {aliases[0]}\n")

    def _close(self, failed: bool) -> None:
        Path("closed").write_text(str(failed))

    @property
    def experiment(self) -> Any:
        return None


class ThreadedTracker(FileTracker):
    waits, patience = True, 60.0


def rows() -> list[Any]:
    return [json.loads(line) for line in STORE.read_text().splitlines()]


def fit(tracker, down=(), up=(), **options):
    def change(run):
        if run.progress.steps in down:
            DOWN.touch()
        if run.progress.steps in up:
            assert tracker.refused.wait(300)  # by its thread, where it has one
            DOWN.unlink()
        if run.progress.steps == options.get("dies"):
            raise KeyboardInterrupt

    given = {"max_steps": 10, "log_every": 1, "checkpoint": CheckpointConfig(every="3 steps", best=0)}
    trainer = quiet(**given, run_dir="run", loggers=tracker, callbacks=[LambdaCallback(on_step_end=change)])
    return trainer.fit(Regression(), pairs(20), pairs(4), resume="auto")


@pytest.mark.parametrize("kind", [FileTracker, ThreadedTracker])
def test_a_tracker_that_is_down_for_a_while_gets_each_value_once_with_one_warning(kind):
    with warned("does not take the values of step [1-4]: it is down") as found:  # a thread may be late
        fit(kind(), down=(4,), up=(7,))
    assert len(found) == 1
    assert [step for step, _ in rows()] == list(range(1, 11))
    assert {*rows()[-1][1]} == {"epoch", "train/loss", "validation/loss"}
    assert [values["epoch"] for _, values in rows()] == [0.0] * 9 + [1.0]
    assert Path("closed").read_text() == "False"


def test_what_a_tracker_does_not_take_is_written_through_no_link():
    def act(run):
        if run.progress.steps == 3:
            DOWN.touch()
            Path("run/unsent-file.jsonl").symlink_to(Path("other").absolute())

    options = {"run_dir": "run", "loggers": FileTracker(), "callbacks": [LambdaCallback(on_step_end=act)]}
    with heard(), pytest.raises(OSError, match="not written through links"):
        quiet(max_steps=5, log_every=1, **options).fit(Regression(), pairs(20))
    assert not Path("other").exists()


def test_what_a_tracker_does_not_take_is_in_a_file_and_sent_after_a_resume():
    with heard():
        with pytest.raises(KeyboardInterrupt):
            fit(FileTracker(), down=(4,), dies=8)
        unsent = Path("run/unsent-file.jsonl")
        assert [json.loads(line)["step"] for line in unsent.read_text().splitlines()] == [3, 4, 5, 6, 7]
        assert Path("closed").read_text() == "True"
        DOWN.unlink()
        fit(FileTracker())
    assert not unsent.exists()
    assert [step for step, _ in rows()] == list(range(1, 11))


def test_a_tracker_that_cannot_be_opened_ends_the_fit_before_its_first_step():
    DOWN.write_text(" at http://me:hush@host")
    why = r"The tracker cannot be opened: it is down at http://me:<hidden>@host\. Start it"
    with pytest.raises(ConfigError, match=why) as caught:
        fit(FileTracker())
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    assert not Path("run/metrics.csv").exists()


def test_a_tracker_gets_the_size_of_the_model_and_no_secret(monkeypatch):
    monkeypatch.setattr(sys, "argv", given := ["train.py", "--storage=postgresql://me:hush@host/db"])
    fit(FileTracker())
    command, config = json.loads(Path("opened").read_text())
    assert command == ["train.py", "--storage=postgresql://me:<hidden>@host/db"]
    assert sys.argv is given
    assert config["model"] == {"parameters": 5, "trainable": 5}


def test_checkpoints_and_weights_are_stored_as_chosen():
    latest, best, weights = "checkpoint latest", "checkpoint best", "weights latest"
    for artifacts, wanted in (("best", [best, weights]), ("all", [latest, latest, best, weights])):
        Path("stored").write_text("")
        given = {"loggers": FileTracker(artifacts=artifacts), "checkpoint": CheckpointConfig(every="2 steps")}
        quiet(max_steps=4, run_dir=artifacts, **given).fit(Regression(), pairs(8), pairs(4))
        assert Path("stored").read_text().splitlines() == wanted


def test_a_tracker_is_refused_with_what_to_do():
    absent = type("Absent", (FileTracker,), {"package": "no_such_package"})
    assert_refused(MissingDependencyError, {"missing": (absent, "no_such_package", "drivetrain[file]")})
    wrong = type("Wandb", (FileTracker,), {})
    assert_refused(ConfigError, {"artifacts": (lambda: wrong(artifacts="al"), "'all'")})
    trainer = quiet(max_steps=1, loggers=(FileTracker(), FileTracker()), run_dir="two")
    with pytest.raises(ConfigError, match="two FileTracker, and both would write to the same run"):
        trainer.fit(Regression(), pairs())
    trainer = quiet(max_steps=1, callbacks=[LambdaCallback(on_fit_start=lambda run: run.logger("csv"))])
    with pytest.raises(ConfigError, match=r"no logger 'csv'; it has none"):
        trainer.fit(Regression(), pairs())
