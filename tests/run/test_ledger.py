"""What a run's time goes to is written down as it passes, also by processes that are killed."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.forked import run_forked
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.core.messages import logger
from drivetrain.run.ledger_report import KINDS, NAME, RunLedger, read_ledger

OFTEN = CheckpointConfig(every="1 step", by=None, keep_last=9)


def read(run_dir: Path) -> RunLedger:  # the ledger, in which every second has one kind
    ledger = read_ledger(run_dir)
    assert set(ledger.seconds) == set(KINDS)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall, rel=1e-9)
    return ledger


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (run_dir / NAME).read_text(encoding="ascii").splitlines()]


def slept(seconds: float) -> Callable[[Any], None]:
    return lambda run: time.sleep(seconds)


def fit(run_dir: Path, *hooks: Any, epochs: int = 1, resume: str | None = "auto", **options: Any) -> Any:
    options = {"checkpoint": True, "run_dir": run_dir, "callbacks": hooks, **options}
    return quiet(max_epochs=epochs, **options).fit(Regression(), pairs(), pairs(2), resume=resume)


KILLED = """
import os, signal
from pathlib import Path
from tests.run.test_ledger import fit
from drivetrain import CheckpointConfig, LambdaCallback
def kill(run):
    if run.progress.steps == 9:
        os.kill(os.getpid(), signal.SIGKILL)
every = CheckpointConfig(every="5 steps", by=None)
fit(Path("run"), LambdaCallback(on_step_end=kill), epochs=2, checkpoint=every)
"""


def test_a_run_that_is_killed_and_resumed_has_the_ledger_of_both_attempts() -> None:
    """It is killed in its ninth step, and goes on from the fifth."""
    Path("killed.py").write_text(KILLED, encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = run_forked(["killed.py"], Path.cwd(), {**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run_dir = Path("run").resolve()
    assert [each.ended for each in read(run_dir).attempts] == [None]
    fit(run_dir, epochs=2)
    ledger = read(run_dir)
    assert [(each.resumed, each.ended) for each in ledger.attempts] == [(0, None), (5, "finished")]
    spent = ("compute", "evaluation", "set-up", "restore", "save")
    assert all(ledger.seconds[kind] > 0 for kind in spent)
    assert ledger.steps == 10
    assert ledger.goodput == ledger.seconds["compute"] / ledger.wall


def test_warnings_and_the_error_that_ends_an_attempt_are_kept_once(tmp_path: Path) -> None:
    def fails(run: Any) -> None:
        for text in ("twice", "twice", "x" * 3000):
            logger("drivetrain.tests").warning(text)
        raise ValueError("why")

    with warned("twice"), warned("xxx"), pytest.raises(ValueError, match="why"):
        fit(tmp_path, LambdaCallback(on_step_end=fails))
    with warned("after the fit"):
        logger("drivetrain.tests").warning("after the fit")
    (attempt,) = read(tmp_path).attempts
    assert list(attempt.warnings) == ["twice", "x" * 2000]
    assert (attempt.ended, attempt.error) == ("ValueError", "why")


class Batches(list[Any]):  # batches that take a while to come
    def __iter__(self) -> Iterator[Any]:
        return (each for each in super().__iter__() if not time.sleep(0.1))


def test_each_kind_of_time_goes_where_it_belongs(tmp_path: Path) -> None:
    def step(self: Any, batch: Any) -> Any:
        time.sleep(0.05)
        return self.loss(self(batch[0]), batch)

    hooks = LambdaCallback(
        on_fit_start=slept(0.2),
        on_step_end=slept(0.06),
        on_evaluation_start=slept(0.15),
        on_checkpoint_saved=slept(0.1),
        on_fit_end=slept(0.03),
    )
    nothing: Any = lambda *given: None  # noqa: E731
    logger = SimpleNamespace(log_metrics=nothing, log_config=nothing, close=lambda: time.sleep(0.2))
    options: dict[str, Any] = {"run_dir": tmp_path, "loggers": logger, "checkpoint": True}
    data = Batches(pairs(6))
    quiet(max_epochs=1, callbacks=[hooks], **options).fit(variant(training_step=step)(), data, pairs(2))
    ledger = read(tmp_path)
    train = 3 * (0.05 + 0.06) + 0.03
    least = {"set-up": 0.2 + 0.2, "data": 0.3, "compute": train, "evaluation": 0.15, "save": 0.1}
    assert [kind for kind, seconds in least.items() if ledger.seconds[kind] < seconds] == []
    assert ledger.wall >= sum(least.values())
    assert ledger.seconds["lost work"] == ledger.seconds["waiting"] == 0


def test_resuming_from_an_earlier_checkpoint_loses_what_was_made_after_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": OFTEN, "run_dir": tmp_path}
    slow = LambdaCallback(on_step_end=slept(0.05))
    quiet(max_steps=8, callbacks=[slow], **options).fit(Regression(), pairs())
    earlier = str(tmp_path / "checkpoints" / "step-00000003")
    quiet(max_steps=9, callbacks=[slow], **options).fit(Regression(), pairs(), resume=earlier)
    ledger = read(tmp_path)
    saved = [each["steps"] for each in events(tmp_path) if each["event"] == "save"]
    assert list(dict.fromkeys(saved)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [(each.resumed, each.steps) for each in ledger.attempts] == [(0, 8), (3, 9)]
    assert ledger.seconds["lost work"] >= 5 * 0.05
    assert ledger.seconds["compute"] >= 9 * 0.05


def test_a_line_that_a_kill_has_torn_does_not_spoil_the_next(tmp_path: Path) -> None:
    for epochs in (1, 2):
        fit(tmp_path, epochs=epochs)
        with (tmp_path / NAME).open("a", encoding="ascii") as file:
            file.write('{"v":1,"event":"be')
    assert read_ledger(tmp_path).unreadable == 2
    lines = (tmp_path / NAME).read_text(encoding="ascii").splitlines()
    assert [json.loads(each)["v"] for each in lines if '"event":"start"' in each] == [1, 1]


def test_the_ledger_names_how_an_attempt_ended(tmp_path: Path) -> None:
    for _ in quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path / "left").steps(Regression(), pairs()):
        break
    assert [(each.ended, each.steps) for each in read(tmp_path / "left").attempts] == [("finished", 1)]

    def fail(run: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(tmp_path, LambdaCallback(on_step_end=slept(0.02), on_epoch_end=fail))
    assert [each.ended for each in read(tmp_path).attempts] == ["ValueError"]
    fit(tmp_path)
    first, second = read(tmp_path).attempts
    assert (first.ended, second.ended) == ("ValueError", "finished")
    assert first.seconds["lost work"] >= 5 * 0.02  # nothing was saved: all was made again


def test_a_ledger_that_cannot_be_written_is_reported_once_and_made_up_for(tmp_path: Path) -> None:
    for choice in ("raise", "warn"):
        (tmp_path / choice / NAME).mkdir(parents=True)
        with warned(f"the end of {NAME} was not saved") as caught:
            assert fit(tmp_path / choice, epochs=2, on_save_error=choice).progress.steps == 10
        assert len(caught) == 1


def test_of_several_ranks_the_first_writes_the_ledger(tmp_path: Path) -> None:
    on_two_ranks(lambda: fit(tmp_path, strategy="ddp", devices=2).progress.steps)
    ledger = read(tmp_path)
    assert [(each.ended, each.steps) for each in ledger.attempts] == [("finished", 3)]
