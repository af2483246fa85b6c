"""However a run ends, the process is as it was, callbacks have heard of it, and loggers are closed."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, DataError, LambdaCallback, TaskModule


class Failing(Regression):
    """Raises what it is given in its third step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.left = error, 3

    def training_step(self, batch: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().training_step(batch)


class Closing:
    """A logger that counts how often it was closed, and may fail at it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.closed, self.error = 0, error

    def log_metrics(self, metrics: Any, step: int) -> None:
        """Nothing is kept."""

    def log_config(self, config: Any) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


ERRORS = [RuntimeError("planted"), KeyboardInterrupt(), SystemExit(3)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_callbacks_hear_of_an_exception_and_it_is_raised_again(error: BaseException) -> None:
    heard: list[Any] = []
    ends: list[Any] = []
    logger = Closing()
    callback = LambdaCallback(
        on_exception=lambda run: heard.append(run.exception), on_fit_end=lambda run: ends.append(run)
    )
    with pytest.raises(type(error)) as caught:
        quiet(max_epochs=1, callbacks=[callback], loggers=logger).fit(Failing(error), pairs())
    assert caught.value is error
    assert heard == [error]
    assert ends == []
    assert logger.closed == 1


def test_a_note_says_where_the_run_stood() -> None:
    with pytest.raises(RuntimeError) as caught:
        quiet(max_epochs=1).fit(Failing(RuntimeError("planted")), pairs())
    note = "drivetrain: in training, after update 2, epoch 0, position 4, rank 0"
    assert caught.value.__notes__ == [note]


def test_the_note_of_an_evaluation_names_the_loader_and_the_batch() -> None:
    class Odd(Regression):
        def validation_step(self, batch: Any) -> Any:
            if len(batch[0]) == 1:
                raise RuntimeError("planted")
            return super().validation_step(batch)

    with pytest.raises(RuntimeError) as caught:
        quiet().validate(Odd(), {"whole": pairs(4), "odd": pairs(5)})
    assert caught.value.__notes__[0].startswith("drivetrain: in validation, batch ")
    assert "of loader 'odd'" in caught.value.__notes__[0]


def test_the_note_of_a_validation_within_training_says_so() -> None:
    def fail(run: Any) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError) as caught:
        quiet(max_epochs=1, callbacks=[LambdaCallback(on_evaluation_start=fail)]).fit(
            Regression(), pairs(), pairs(4)
        )
    assert caught.value.__notes__ == ["drivetrain: in validation, batch 0, after update 5, rank 0"]


def test_an_exception_in_a_hook_is_handled_like_any_other() -> None:
    heard: list[Any] = []

    def fail(run: Any) -> None:
        raise ValueError("planted")

    callback = LambdaCallback(on_epoch_end=fail, on_exception=lambda run: heard.append(run.exception))
    with pytest.raises(ValueError, match="planted"):
        quiet(max_epochs=1, callbacks=[callback]).fit(Regression(), pairs())
    assert len(heard) == 1


def test_a_callback_that_fails_at_an_exception_does_not_hide_the_first_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Any] = []

    def fail(run: Any) -> None:
        raise ValueError("a second one")

    callbacks = [
        LambdaCallback(on_exception=fail),
        LambdaCallback(on_exception=lambda run: heard.append(run.exception)),
    ]
    with pytest.raises(RuntimeError, match="planted"):
        quiet(max_epochs=1, callbacks=callbacks).fit(Failing(RuntimeError("planted")), pairs())
    assert len(heard) == 1
    assert "a second one" in caplog.text


def test_a_logger_that_cannot_be_closed_leaves_none_of_the_others_open() -> None:
    loggers = [Closing(), Closing(OSError("disk full")), Closing()]
    with pytest.raises(OSError, match="disk full"):
        quiet(max_epochs=1, loggers=loggers).fit(Regression(), pairs())
    assert [each.closed for each in loggers] == [1, 1, 1]


def test_an_error_of_the_data_names_the_batch() -> None:
    def batches() -> Any:
        yield from list(pairs())[:2]
        raise OSError("unreadable")

    with pytest.raises(DataError, match=r"training data raised at batch 2 of epoch 0: OSError: unreadable"):
        quiet(max_epochs=1).fit(Regression(), batches())


def random_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), *rest


@pytest.mark.parametrize("ending", ["to its end", "by an exception", "by leaving the loop"])
def test_a_run_leaves_the_random_streams_of_its_process_alone(ending: str) -> None:
    task, failing = Regression(dropout=0.5), Failing(RuntimeError())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = random_state()
    trainer = quiet(max_epochs=1)
    if ending == "to its end":
        trainer.fit(task, pairs(shuffle=True), pairs(4))
    elif ending == "by an exception":
        with pytest.raises(RuntimeError):
            trainer.fit(failing, pairs(shuffle=True))
    else:
        steps = trainer.steps(task, pairs(shuffle=True))
        next(steps)
        steps.close()
    assert random_state() == before


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_leaves_the_random_streams_of_its_process_alone(verb: str) -> None:
    task = Regression(dropout=0.5)
    before = random_state()
    getattr(quiet(), verb)(task, pairs(4, shuffle=True))
    assert random_state() == before


@pytest.mark.parametrize("fails", [False, True])
def test_deterministic_kernels_are_insisted_on_while_a_run_lasts(fails: bool) -> None:
    seen: list[bool] = []
    look = LambdaCallback(on_step_end=lambda run: seen.append(torch.are_deterministic_algorithms_enabled()))
    trainer = quiet(max_epochs=1, deterministic=True, callbacks=[look])
    if fails:
        with pytest.raises(RuntimeError):
            trainer.fit(Failing(RuntimeError()), pairs())
    else:
        trainer.fit(Regression(), pairs())
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_hook_that_fails_when_the_loop_is_left_is_reported_like_any_other() -> None:
    heard: list[Any] = []

    class Fails(Callback):
        def on_fit_end(self, run: Any) -> None:
            raise ValueError("planted")

        def on_exception(self, run: Any) -> None:
            heard.append(run.exception)

    logger = Closing()
    steps = quiet(max_epochs=1, callbacks=[Fails()], loggers=logger).steps(Regression(), pairs())
    next(steps)
    with pytest.raises(ValueError, match="planted"):
        steps.close()
    assert len(heard) == 1
    assert logger.closed == 1


def test_an_exception_in_the_body_of_a_loop_ends_the_run_in_order() -> None:
    logger, task = Closing(), Regression(dropout=0.5)
    before = random_state()

    def body() -> None:
        for _ in quiet(max_epochs=1, loggers=logger).steps(task, pairs()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert logger.closed == 1
    assert random_state() == before


def test_a_task_can_be_trained_on_after_a_failure(tmp_path: Path) -> None:
    """What the failed window left in the gradients does not count."""
    task: TaskModule = Failing(RuntimeError())
    with pytest.raises(RuntimeError):
        quiet(max_epochs=1, gradient_accumulation_steps=4).fit(task, pairs())
    right = Regression()
    for each in (task, right):
        quiet(max_epochs=1, gradient_accumulation_steps=4).fit(each, pairs())
    assert torch.equal(task.get_parameter("line.weight"), right.line.weight)


SUSPENDED = """
import torch
from tests.support.tasks import Regression, pairs
from drivetrain import Trainer

loop = Trainer(max_epochs=1, run_dir="run", progress_bar=False).steps(Regression(), pairs())
for step in loop:
    raise ValueError("planted")
"""


def test_a_loop_that_is_suspended_when_the_program_ends_is_left_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUSPENDED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: planted"
    assert done.stderr.count("Traceback") == 1
    assert Path("run/checkpoints/update-00000001").is_dir()
    assert list(Path("run").glob("events*")), "loggers are closed, too"


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(features))


def test_batch_norm_on_a_last_batch_of_one_sample_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        quiet(max_epochs=1).fit(Normed(), pairs(5))
    assert any("Use DataLoader(..., drop_last=True)" in note for note in caught.value.__notes__)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to count open files")
@pytest.mark.parametrize("max_steps", [None, 3], ids=["to its end", "stopped in an epoch"])
def test_files_of_workers_are_closed_with_the_run_and_not_by_a_later_search_for_garbage(
    max_steps: int | None,
) -> None:
    def open_files_after_a_fit() -> int:
        trainer = quiet(max_epochs=2, max_steps=max_steps)
        trainer.fit(Regression(), pairs(num_workers=1), pairs(num_workers=1, seed=1))
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":  # it was told to end, and closes its pipe
                thread.join(30)
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()
    try:
        counts = [open_files_after_a_fit() for _ in range(4)]
    finally:
        gc.enable()
    assert counts[1:] == counts[:1] * 3
