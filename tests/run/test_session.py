"""However a run ends, the process is as it was, callbacks have heard of it, and loggers are closed."""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import DataError, LambdaCallback, TaskModule


class Failing(Regression):  # raises what it is given in its third step
    def __init__(self, error: BaseException) -> None:
        super().__init__(dropout=0.5)
        self.error, self.left = error, 3

    def training_step(self, batch: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().training_step(batch)


class Closing:  # a logger that counts how often it was closed, and may fail at it
    def __init__(self, error: Exception | None = None) -> None:
        self.closed, self.error = 0, error

    log_metrics = log_config = lambda self, *given: None

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


def raises(error: Exception) -> Any:
    def act(*_: Any) -> None:
        raise error

    return act


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_on_exception_hears_of_an_error_which_is_raised_again(kind: type[BaseException]) -> None:
    error, heard, ends, logger = kind(3), list[Any](), list[Any](), Closing()
    callback = LambdaCallback(on_exception=lambda run: heard.append(run.exception), on_fit_end=ends.append)
    with pytest.raises(kind) as caught:
        quiet(max_epochs=1, callbacks=[callback], loggers=logger).fit(Failing(error), pairs())
    assert caught.value is error
    assert heard == [error]
    assert ends == []
    assert logger.closed == 1


def test_the_note_of_an_error_says_where_the_run_stood() -> None:
    def step(self: Any, batch: Any) -> Any:
        if len(batch[0]) == 1:
            raise RuntimeError("planted")
        return self.loss(self(batch[0]), batch)

    starts = LambdaCallback(on_evaluation_start=raises(RuntimeError()))
    odd, broken = {"whole": pairs(4), "odd": pairs(5)}, variant(validation_step=step)()
    fit, starting = quiet(max_epochs=1).fit, quiet(max_epochs=1, callbacks=[starts]).fit
    for call, *words in (
        (partial(fit, Failing(RuntimeError()), pairs()), "in training, after step 2, epoch 0, position 4"),
        (partial(starting, Regression(), pairs(), pairs(4)), "in validation, batch 0, after step 5, rank 0"),
        (partial(quiet().validate, broken, odd), "in validation, batch ", "of loader 'odd'"),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert all(each in caught.value.__notes__[0] for each in words)

    def batches() -> Any:
        yield from list(pairs())[:2]
        raise OSError("unreadable")

    with pytest.raises(DataError, match=r"training data raised at batch 2 of epoch 0: OSError: unreadable"):
        quiet(max_epochs=1).fit(Regression(), batches())


def test_an_error_in_a_step_names_the_tasks_method_and_the_shapes_of_its_batch() -> None:
    def loss(self: Any, outputs: Any, batch: Any) -> Any:
        return batch["label"].sum()

    fit, odd = quiet(max_epochs=1).fit, (torch.ones(2, 3), torch.ones(2, 1))
    whole, named = next(iter(pairs(8, 8))), {"features": torch.ones(2, 4)}
    group = ExceptionGroup("both", [ValueError("one"), KeyError("two")])
    for call, *words in (
        (partial(fit, Regression(), [odd]), "in Regression.forward, with the batch (float32[2, 3], float32["),
        (partial(quiet().predict, Regression(), [odd]), "Regression.forward, with", "in predict, batch 0"),
        (partial(fit, variant(loss=loss)(), [named]), "Variant.loss, with the batch {'features': float32"),
        (partial(fit, Regression(), [(whole[0], [1.0] * 8)]), "a list of 8 numbers"),
        (partial(fit, Failing(group), pairs()), "both", "ValueError: one; KeyError: 'two'", "in training"),
    ):
        with pytest.raises(Exception) as caught:
            call()
        assert all(each in caught.value.__notes__[0] for each in words), caught.value.__notes__


def test_an_error_in_a_hook_or_at_its_handling_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    note = LambdaCallback(on_exception=lambda run: heard.append(str(run.exception)))
    for hook in ("on_epoch_end", "on_fit_end"):
        fails = LambdaCallback(**{hook: raises(ValueError(hook))})
        with pytest.raises(ValueError, match=hook):
            quiet(max_epochs=1, callbacks=[fails, note]).fit(Regression(), pairs())
    logger = Closing()
    steps = quiet(max_epochs=1, callbacks=[fails, note], loggers=logger).steps(Regression(), pairs())
    next(steps)
    with pytest.raises(ValueError, match="on_fit_end"):
        steps.close()  # the loop is left
    assert logger.closed == 1
    # A callback that fails at an exception does not hide the first cause.
    second = LambdaCallback(on_exception=raises(ValueError("a second one")))
    with pytest.raises(RuntimeError, match="planted"):
        quiet(max_epochs=1, callbacks=[second, note]).fit(Failing(RuntimeError("planted")), pairs())
    assert "a second one" in caplog.text
    assert heard == ["on_epoch_end", "on_fit_end", "on_fit_end", "planted"]


def random_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), *rest


@pytest.mark.parametrize("ending", ["end", "error", "left", "error in the loop"])
def test_a_fit_leaves_random_streams_and_determinism_as_they_were(ending: str) -> None:
    seen: list[bool] = []
    look = LambdaCallback(on_step_end=lambda run: seen.append(torch.are_deterministic_algorithms_enabled()))
    logger = Closing()
    trainer = quiet(max_epochs=1, deterministic=True, callbacks=[look], loggers=logger)
    task, failing = Regression(dropout=0.5), Failing(ZeroDivisionError())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = random_state()

    def body() -> None:
        for _ in trainer.steps(task, pairs(shuffle=True)):
            raise ZeroDivisionError

    if ending == "end":
        trainer.fit(task, pairs(shuffle=True), pairs(4))
        for verb in ("validate", "test", "predict"):
            getattr(quiet(), verb)(task, pairs(4, shuffle=True))
    elif ending == "left":
        steps = trainer.steps(task, pairs(shuffle=True))
        next(steps)
        steps.close()
    else:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(failing, pairs(shuffle=True)) if ending == "error" else body()
    assert random_state() == before
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    assert logger.closed == 1


def test_gradients_of_a_window_that_failed_do_not_count_in_the_next_fit() -> None:
    task: TaskModule = Failing(RuntimeError())
    task.get_submodule("dropout").p = 0.0  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        quiet(max_epochs=1, gradient_accumulation_steps=4).fit(task, pairs())
    right = Regression()
    for each in (task, right):
        quiet(max_epochs=1, gradient_accumulation_steps=4).fit(each, pairs())
    assert torch.equal(task.get_parameter("line.weight"), right.line.weight)


SUSPENDED = """
from tests.support.tasks import Regression, pairs
from drivetrain import Trainer
for result in (loop := Trainer(max_epochs=1, run_dir="run", progress_bar=False).steps(Regression(), pairs())):
    raise ValueError("planted")
"""


@pytest.mark.landing  # the interpreter's end is the subject
def test_a_steps_loop_that_is_suspended_when_the_program_ends_is_left_in_order() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SUSPENDED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: planted"
    assert done.stderr.count("Traceback") == 1
    assert Path("run/checkpoints/step-00000001").is_dir()
    assert list(Path("run").glob("events*")), "loggers are closed, too"
