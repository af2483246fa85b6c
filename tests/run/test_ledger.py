"""What a run's time goes to is written down as it passes, also by processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.messages import heard, warned
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import CheckpointConfig, LambdaCallback, LossSpike
from drivetrain.run.ledger_report import KINDS, NAME, RunLedger, read_ledger
from drivetrain.testing import run_distributed

UPDATE = 0.4

PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
from tests.support.tasks import Regression, pairs, quiet
from drivetrain import CheckpointConfig

run_dir, kill = sys.argv[1], int(sys.argv[2])

class Slow(Regression):
    def training_step(self, batch):
        time.sleep({UPDATE})
        Path(run_dir, "began").write_text(str(time.time()))
        made.append(batch)
        if len(made) == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)

    def validation_step(self, batch):
        time.sleep(0.1)
        return super().validation_step(batch)

made = []
time.sleep(0.3)
config = CheckpointConfig(every="5 steps", by=None)
trainer = quiet(max_epochs=2, checkpoint=config, run_dir=run_dir, log_every=1)
trainer.fit(Slow(), pairs(), pairs(2), resume="auto")
Path(run_dir, "ended").write_text(str(time.time()))
"""


def program(directory: Path, kill: int) -> int:
    """Train in a process of its own, which kills itself in its `kill`-th update; how it ended."""
    file = directory / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", str(file), str(directory / "run"), str(kill)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, timeout=120, check=False).returncode


def adds_up(ledger: RunLedger) -> bool:
    """Whether every second has one kind."""
    seconds = ledger.seconds
    return set(seconds) == set(KINDS) and sum(seconds.values()) == pytest.approx(ledger.wall, rel=1e-9)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (run_dir / NAME).read_text(encoding="ascii").splitlines()]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system kills otherwise")
def test_every_second_of_a_run_that_is_killed_and_goes_on_is_assigned(tmp_path: Path) -> None:
    """Compared with a stopwatch outside. It is killed in its ninth update, and goes on from the fifth."""
    began = time.time()
    assert program(tmp_path, 9) == -signal.SIGKILL
    killed = time.time()
    first = read_ledger(tmp_path / "run")
    assert [each.ended for each in first.attempts] == [None]
    time.sleep(1)
    again = time.time()
    assert program(tmp_path, 0) == 0
    ended = float((tmp_path / "run" / "ended").read_text(encoding="ascii"))

    ledger = read_ledger(tmp_path / "run")
    assert adds_up(ledger)
    assert ledger.wall == pytest.approx(ended - began, rel=0.05)
    assert [(each.resumed, each.ended) for each in ledger.attempts] == [(0, None), (5, "finished")]
    seconds = ledger.seconds
    assert seconds["waiting"] >= again - killed
    assert seconds["lost work"] >= 1.0  # of its last second a process may tell nothing
    assert seconds["waiting"] + seconds["lost work"] >= again - killed + 4 * UPDATE - 0.02
    assert seconds["compute"] >= 10 * UPDATE
    assert seconds["evaluation"] >= 2 * 0.1  # one at each epoch's end
    assert seconds["set-up"] >= 2 * 0.3
    assert seconds["restore"] > 0
    assert seconds["save"] > 0
    assert ledger.updates == 10
    assert ledger.goodput == seconds["compute"] / ledger.wall


def slept(seconds: float) -> Callable[[Any], None]:
    return lambda run: time.sleep(seconds)


class SlowToClose:
    """A logger."""

    def log_metrics(self, metrics: Any, step: int) -> None:
        """Nothing."""

    def log_config(self, config: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        time.sleep(0.2)


class Batches:
    """Batches that take a while to come."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[Tensor]]:
        for features, target in pairs(6):
            time.sleep(0.1)
            yield [features, target]


def test_each_kind_of_time_goes_where_it_belongs(tmp_path: Path) -> None:
    class Slow(Regression):
        def training_step(self, batch: Any) -> Any:
            time.sleep(0.05)
            return super().training_step(batch)

    hooks = LambdaCallback(
        on_fit_start=slept(0.2),
        on_step_end=slept(0.06),
        on_evaluation_start=slept(0.15),
        on_checkpoint_saved=slept(0.1),
        on_fit_end=slept(0.03),
    )
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path, callbacks=[hooks])
    trainer.fit(Slow(), pairs())  # so that the next fit is not the first of the process, which began with it
    began = time.perf_counter()
    options = {"run_dir": tmp_path / "second", "loggers": SlowToClose()}
    trainer = quiet(max_epochs=1, checkpoint=True, callbacks=[hooks], **options)
    trainer.fit(Slow(), Batches(), pairs(2))
    wall = time.perf_counter() - began
    ledger = read_ledger(tmp_path / "second")
    assert adds_up(ledger)
    assert 1.3 <= ledger.wall <= wall + 0.01  # what is slept at least, and a stopwatch outside
    seconds = ledger.seconds
    for kind, least in {
        "set-up": 0.2 + 0.2,
        "data": 0.3,
        "compute": 3 * (0.05 + 0.06) + 0.03,
        "evaluation": 0.15,
        "save": 0.1,
    }.items():
        assert seconds[kind] >= least, kind
    assert seconds["lost work"] == seconds["waiting"] == 0
    assert ledger.goodput == seconds["compute"] / ledger.wall


def test_fits_in_one_process_and_one_directory_are_attempts_of_one_run(tmp_path: Path) -> None:
    for epochs in (1, 2):
        quiet(max_epochs=epochs, checkpoint=True, run_dir=tmp_path).fit(Regression(), pairs(), resume="auto")
        time.sleep(0.2)
    ledger = read_ledger(tmp_path)
    assert [(each.resumed, each.updates) for each in ledger.attempts] == [(0, 5), (5, 10)]
    assert ledger.seconds["lost work"] == 0
    assert ledger.seconds["waiting"] >= 0.2
    assert adds_up(ledger)


def test_the_times_of_earlier_attempts_are_not_counted_again(tmp_path: Path) -> None:
    def age(run: Any) -> None:
        for kind in ("data", "evaluation", "save"):
            run.timing[kind] += 1e6

    for epochs, hooks in ((1, [LambdaCallback(on_epoch_end=age)]), (2, [])):
        trainer = quiet(max_epochs=epochs, checkpoint=True, run_dir=tmp_path, callbacks=hooks)
        trainer.fit(Regression(), pairs(), pairs(2), resume="auto")
    first, second = read_ledger(tmp_path).attempts
    for kind in ("data", "evaluation", "save"):
        assert first.seconds[kind] >= 1e6, kind
        assert second.seconds[kind] < 1e6, kind


def test_going_on_from_an_earlier_checkpoint_loses_what_was_made_after_it(tmp_path: Path) -> None:
    slow = LambdaCallback(on_step_end=slept(0.05))
    config = CheckpointConfig(every="1 step", by=None, keep_last=9)
    options: dict[str, Any] = {"checkpoint": config, "run_dir": tmp_path, "callbacks": [slow]}
    quiet(max_steps=8, **options).fit(Regression(), pairs())
    earlier = str(tmp_path / "checkpoints" / "update-00000003")
    quiet(max_steps=9, **options).fit(Regression(), pairs(), resume=earlier)
    ledger = read_ledger(tmp_path)
    saved = [each["updates"] for each in lines(tmp_path) if each["event"] == "save"]
    assert list(dict.fromkeys(saved)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [(each.resumed, each.updates) for each in ledger.attempts] == [(0, 8), (3, 9)]
    assert ledger.seconds["lost work"] >= 5 * 0.05
    assert ledger.seconds["compute"] >= 9 * 0.05
    assert adds_up(ledger)


def test_a_line_that_a_kill_has_torn_does_not_spoil_the_next(tmp_path: Path) -> None:
    for epochs in (1, 2):
        quiet(max_epochs=epochs, checkpoint=True, run_dir=tmp_path).fit(Regression(), pairs(), resume="auto")
        with (tmp_path / NAME).open("a", encoding="ascii") as file:
            file.write('{"v":1,"event":"be')
    ledger = read_ledger(tmp_path)
    assert ledger.unreadable == 2
    lines = (tmp_path / NAME).read_text(encoding="ascii").splitlines()
    starts = [each for each in lines if '"event":"start"' in each]
    assert [json.loads(each)["v"] for each in starts] == [1, 1]


def test_a_loop_that_is_left_has_ended(tmp_path: Path) -> None:
    for _ in quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path).steps(Regression(), pairs()):
        time.sleep(0.3)
        break
    ledger = read_ledger(tmp_path)
    assert ledger.attempts[0].ended == "finished"
    assert ledger.updates == 1
    assert ledger.seconds["compute"] >= 0.3


def test_an_error_is_named_and_its_attempt_counts(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        quiet(
            max_epochs=1, checkpoint=True, run_dir=tmp_path, callbacks=[LambdaCallback(on_epoch_end=fail)]
        ).fit(Regression(), pairs())
    assert [each.ended for each in read_ledger(tmp_path).attempts] == ["ValueError"]
    quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path).fit(Regression(), pairs(), resume="auto")
    again = read_ledger(tmp_path)
    assert [each.ended for each in again.attempts] == ["ValueError", "finished"]
    assert again.attempts[0].seconds["compute"] <= 1e-3  # nothing was saved: all was made again
    assert again.attempts[0].seconds["lost work"] > 0


def test_log_points_tell_that_the_run_is_alive(tmp_path: Path) -> None:
    wait = LambdaCallback(on_step_end=lambda run: time.sleep(1.1 if run.progress.updates == 2 else 0))
    options: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path, "callbacks": [wait], "log_every": 1}
    quiet(max_epochs=1, **options).fit(Regression(), pairs())
    alive = next(each for each in lines(tmp_path) if each["event"] == "log")
    assert alive["updates"] == 2
    assert alive["spent"]["compute"] >= 1.1


def test_who_writes_nothing_else_has_no_ledger(tmp_path: Path) -> None:
    quiet(max_epochs=1, run_dir=tmp_path / "run").fit(Regression(), pairs())
    quiet(max_epochs=1, run_dir=tmp_path / "run").validate(Regression(), pairs())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_a_ledger_that_cannot_be_written_is_told_of_once(choice: str, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    trainer = quiet(max_epochs=2, checkpoint=True, run_dir=tmp_path, on_save_error=choice)
    with warned(f"the end of {NAME} was not saved") as caught:
        result = trainer.fit(Regression(), pairs())
    assert result.progress.updates == 10
    assert len(caught) == 1


def test_a_ledger_that_could_not_be_written_for_a_while_lacks_nothing(tmp_path: Path) -> None:
    file = tmp_path / NAME
    slow = LambdaCallback(on_step_end=slept(0.02))

    def break_it(run: Any) -> None:
        file.unlink()
        file.mkdir()

    at = {2: break_it, 8: lambda run: file.rmdir()}
    faults = LambdaCallback(on_step_end=lambda run: at.get(run.progress.updates, slept(0))(run))
    config = CheckpointConfig(every="1 step", by=None)
    quiet(max_epochs=2, checkpoint=config, run_dir=tmp_path, callbacks=[slow, faults]).fit(
        Regression(), pairs()
    )
    ledger = read_ledger(tmp_path)
    assert ledger.updates == 10
    assert ledger.seconds["compute"] >= 10 * 0.02
    assert ledger.attempts[0].resumed == 0


def of_two(run_dir: str) -> None:
    quiet(strategy="ddp", devices=2, max_epochs=1, checkpoint=True, run_dir=run_dir).fit(
        Regression(), pairs()
    )


def test_of_several_processes_the_first_writes(tmp_path: Path) -> None:
    run_distributed(of_two, str(tmp_path))
    ledger = read_ledger(tmp_path)
    assert [each.ended for each in ledger.attempts] == ["finished"]
    assert ledger.updates == 3
    assert adds_up(ledger)


def test_what_a_roll_back_throws_away_is_lost(tmp_path: Path) -> None:
    class Spiking(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            time.sleep(0.02)
            loss = super().loss(outputs, batch)
            made.append(loss)
            return loss * 1e4 if len(made) == 34 else loss

    made: list[Tensor] = []
    spike = LossSpike(action="rollback", window=10)
    config = CheckpointConfig(every="10 steps", by=None)
    run = quiet(max_epochs=4, checkpoint=config, run_dir=tmp_path, callbacks=[spike], log_every=1)
    with heard():
        run.fit(Spiking(), pairs(20))
    assert "back" in [each["event"] for each in lines(tmp_path)]
    ledger = read_ledger(tmp_path)
    assert ledger.seconds["lost work"] >= 3 * 0.02
    assert ledger.seconds["restore"] > 0
    assert adds_up(ledger)
