"""Schedulers of torch that are stepped by epoch, every few steps, or with a metric (`TorchSchedule`)."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from drivetrain import CheckpointConfig, CheckpointError, ConfigError, LambdaCallback, TorchSchedule

NO_BETTER = {"threshold": 1e6, "threshold_mode": "abs"}  # no value improves on the first one
PLATEAU = functools.partial(ReduceLROnPlateau, factor=0.5, patience=0, min_lr=0.05, **NO_BETTER)
HALVES = functools.partial(ExponentialLR, gamma=0.5)


def task(make: Callable[[Any], Any], **options: Any) -> Regression:
    def factory(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.8, momentum=0.5)
        return optimizer, TorchSchedule(make(optimizer), **options)

    return Regression(factory)


def rates(given: Any, validation: Any = None, leave_at: int = 0, **options: Any) -> list[float]:
    seen: list[float] = []
    note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
    resume = options.pop("resume", None)
    trainer = quiet(**{"max_epochs": 4, **options, "callbacks": [note]})
    steps = trainer.steps(given, pairs(10), validation, resume=resume)
    for result in steps:
        if result.step + 1 == leave_at:
            break
    steps.close()
    return seen


def test_torch_schedule_by_epoch_has_the_rates_of_a_hand_written_loop() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.8)
    schedule, expected = CosineAnnealingLR(optimizer, 4), []
    for _ in range(4):
        expected += [optimizer.param_groups[0]["lr"]] * 5
        optimizer.step()
        schedule.step()
    assert rates(task(lambda optimizer: CosineAnnealingLR(optimizer, 4), every="1 epoch")) == expected


def test_torch_schedule_counts_epochs_or_steps() -> None:
    assert rates(task(HALVES, every="2 epochs")) == [0.8] * 10 + [0.4] * 10
    assert rates(task(HALVES, every=3), max_steps=7) == [0.8] * 3 + [0.4] * 3 + [0.2]
    assert rates(task(HALVES), max_steps=3) == [0.8, 0.4, 0.2]
    accumulated = rates(task(HALVES, every="1 epoch"), gradient_accumulation_steps=2)  # moves no epoch
    assert accumulated == [0.8] * 3 + [0.4] * 3 + [0.2] * 3 + [0.1] * 3
    made = task(lambda _: functools.partial(StepLR, step_size=1, gamma=0.5), every="1 epoch")
    assert rates(made, max_epochs=2) == [0.8] * 5 + [0.4] * 5


def test_plateau_follows_each_validation_or_a_value_of_training() -> None:
    watching = task(PLATEAU, metric="validation/loss")  # each validation but the first halves the rate
    assert rates(watching, pairs(4), validate_every=2, max_steps=8) == [0.8] * 4 + [0.4] * 2 + [0.2] * 2
    training = task(lambda _: PLATEAU, every="1 epoch", metric="train/loss")
    assert rates(training, log_every=5, max_epochs=3) == [0.8] * 10 + [0.4] * 5
    optional = task(PLATEAU, metric="validation/los", required=False)
    assert rates(optional, pairs(4), max_epochs=2) == [0.8] * 10


BY_LAMBDA = functools.partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch))
RESUMED = {"make": BY_LAMBDA, "every": "1 epoch"}, {"make": PLATEAU, "metric": "validation/loss"}


@pytest.mark.parametrize("options", RESUMED, ids=["lambda", "plateau"])
def test_torch_schedule_resumes_bitwise(tmp_path: Path, options: Any) -> None:
    whole = task(**options)
    expected = rates(whole, pairs(4))
    for at in (5, 7):
        resumed = task(**options)
        saved = {"checkpoint": CheckpointConfig(every="1 step", best=0), "run_dir": tmp_path / str(at)}
        first = rates(task(**options), pairs(4), leave_at=at, **saved)
        assert len(first) == at
        assert first + rates(resumed, pairs(4), resume="auto", **saved) == expected
        assert weights(resumed) == weights(whole)


def test_a_schedule_that_is_never_stepped_is_named_with_the_length_of_the_fit() -> None:
    for every, words in (
        (21, "every 21 steps, and this fit has only 20 steps"),
        ("5 epochs", "only 4 epochs"),
    ):
        with warned(words):
            assert rates(task(HALVES, every=every)) == [0.8] * 20
    assert rates(task(HALVES, every="4 epochs")) == [0.8] * 20  # and no warning: it is stepped at the end


def test_a_one_cycle_that_is_shorter_than_the_run_is_refused_before_it_begins() -> None:
    def one_cycle(steps: int) -> Any:
        return lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=steps, cycle_momentum=False)

    for factory, settings, text in (
        (one_cycle(9), {}, r"can take 9 steps, and this run of 10 steps calls its step\(\) 10 times"),
        (one_cycle(1), {"every": "1 epoch"}, "this run of 2 epochs .*self.run_length.epochs"),
    ):
        with pytest.raises(ConfigError, match=text):
            rates(task(factory, **settings), max_epochs=2)
    for factory, settings in (
        (one_cycle(10), {}),
        (one_cycle(5), {"every": "2 steps"}),
        (one_cycle(2), {"every": "1 epoch"}),
    ):
        assert len(rates(task(factory, **settings), max_epochs=2)) == 10


def test_the_state_of_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    def joined(optimizer: Any) -> SequentialLR:
        return SequentialLR(optimizer, [StepLR(optimizer, 1), HALVES(optimizer)], [2])

    saved: dict[str, Any] = {"checkpoint": CheckpointConfig(best=0), "run_dir": tmp_path}
    rates(task(joined), max_epochs=1, **saved)
    names = r"has the schedule StepLR, .* the schedule SequentialLR\(StepLR, ExponentialLR\)"
    with pytest.raises(CheckpointError, match=names):
        rates(task(lambda own: StepLR(own, 1)), resume="auto", **saved)


def test_refusals_of_torch_schedule(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    step = StepLR(optimizer, 1)
    saved = {"checkpoint": CheckpointConfig(every=100, best=0), "run_dir": tmp_path}
    misspelt = task(PLATEAU, metric="validation/los")
    cases: dict[str, tuple[Any, ...]] = {
        "half an epoch": (lambda: TorchSchedule(step, every="0.5 epochs"), "whole epochs"),
        "no metric": (lambda: TorchSchedule(ReduceLROnPlateau(optimizer)), "metric='validation/loss'"),
        "a metric": (lambda: TorchSchedule(step, metric="validation/loss"), "StepLR.step takes none"),
        "Lightning's": (lambda: TorchSchedule(StepLR, monitor="validation/loss"), "'metric'"),
        "another's": (lambda: rates(task(lambda _: step)), "another optimizer"),
        "no validation": (lambda: rates(task(PLATEAU, metric="validation/loss")), "never validates"),
        "not logged": (lambda: rates(misspelt, pairs(4), **saved), "'validation/los'"),
    }
    assert_refused(ConfigError, cases)
    assert (tmp_path / "checkpoints" / "step-00000005").is_dir()  # the last ends the run once it is saved


def test_a_scheduler_that_is_stepped_by_step_says_so_at_the_start() -> None:
    with heard(level=logging.INFO) as told:
        assert rates(task(HALVES), max_epochs=2) == [0.8 * 0.5**step for step in range(10)]
    assert "ExponentialLR.step() is called after each step" in str(told)
    assert "every='1 epoch'" in str(told)
    with heard(level=logging.INFO) as told:
        rates(task(HALVES, every="1 epoch"), max_epochs=2)
    assert not told
