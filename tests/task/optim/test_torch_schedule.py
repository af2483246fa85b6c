"""Schedulers of torch that are stepped by epoch, every few updates, or with a metric."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback, TorchSchedule
from drivetrain.testing import run_distributed

# No value improves on the first one.
PLATEAU = functools.partial(
    ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e6, threshold_mode="abs", min_lr=0.05
)


def factory(make: Callable[[Any], Any], **options: Any) -> Callable[[list[nn.Parameter]], Any]:
    """What a task's `configure_optimizers` returns."""

    def optimizer_and_schedule(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.8, momentum=0.5)
        return optimizer, TorchSchedule(make(optimizer), **options)

    return optimizer_and_schedule


def rates(task: Any, validation: Any = None, resume: str | None = None, **options: Any) -> list[float]:
    """The learning rate of each update; an epoch has five."""
    seen: list[float] = []
    note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
    leave_at = options.pop("leave_at", None)
    trainer = quiet(**{"max_epochs": 4, **options, "callbacks": [note]})
    steps = trainer.steps(task, pairs(10), validation, resume=resume)
    for step in steps:
        if step.update + 1 == leave_at:
            break
    steps.close()
    return seen


def test_a_schedule_by_epoch_has_the_rates_of_a_hand_written_loop() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    schedule = CosineAnnealingLR(optimizer, 4)
    expected = []
    for _ in range(4):
        expected += [optimizer.param_groups[0]["lr"]] * 5
        optimizer.step()
        schedule.step()
    task = Regression(factory(lambda optimizer: CosineAnnealingLR(optimizer, 4), every="1 epoch"))
    assert rates(task) == expected


def test_the_interval_counts_epochs_or_updates() -> None:
    halves = functools.partial(ExponentialLR, gamma=0.5)
    by_two_epochs = Regression(factory(halves, every="2 epochs"))
    assert rates(by_two_epochs) == [0.8] * 10 + [0.4] * 10
    assert rates(Regression(factory(halves, every=3)), max_steps=7) == [0.8] * 3 + [0.4] * 3 + [0.2]
    assert rates(Regression(factory(halves)), max_steps=3) == [0.8, 0.4, 0.2]
    # Accumulation and a resume in the middle do not move an epoch.
    assert rates(Regression(factory(halves, every="1 epoch")), gradient_accumulation_steps=2) == (
        [0.8] * 3 + [0.4] * 3 + [0.2] * 3 + [0.1] * 3
    )


def test_a_scheduler_may_be_made_by_a_function_of_the_optimizer() -> None:
    made = factory(lambda _: functools.partial(StepLR, step_size=1, gamma=0.5), every="1 epoch")
    assert rates(Regression(made), max_epochs=2) == [0.8] * 5 + [0.4] * 5
    assert rates(
        Regression(factory(lambda _: PLATEAU, metric="validation/loss")), pairs(4), max_epochs=3
    ) == ([0.8] * 10 + [0.4] * 5)


def test_a_plateau_follows_each_validation() -> None:
    task = Regression(factory(PLATEAU, metric="validation/loss"))
    # Each validation but the first halves the rate.
    assert rates(task, pairs(4), validate_every=2, max_steps=8) == [0.8] * 4 + [0.4] * 2 + [0.2] * 2


def test_a_plateau_may_watch_a_value_of_training_without_validation() -> None:
    task = Regression(factory(PLATEAU, every="1 epoch", metric="train/loss"))
    assert rates(task, log_every=5, max_epochs=3) == [0.8] * 10 + [0.4] * 5


@pytest.mark.parametrize("at", [5, *(pytest.param(each, marks=pytest.mark.full) for each in (3, 7, 10))])
@pytest.mark.parametrize(
    "options",
    [
        {"make": functools.partial(StepLR, step_size=1, gamma=0.5), "every": "1 epoch"},
        {"make": functools.partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)), "every": "1 epoch"},
        {"make": PLATEAU, "metric": "validation/loss"},
        {"make": PLATEAU, "every": "1 epoch", "metric": "validation/loss"},
    ],
    ids=["step", "lambda", "plateau", "plateau by epoch"],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, options: Any, at: int) -> None:
    whole, resumed = Regression(factory(**options)), Regression(factory(**options))
    expected = rates(whole, pairs(4))
    saved = {"checkpoint": CheckpointConfig(every="1 step", best=0), "run_dir": tmp_path}
    first = rates(Regression(factory(**options)), pairs(4), leave_at=at, **saved)
    assert len(first) == at
    assert first + rates(resumed, pairs(4), resume="auto", **saved) == expected
    assert weights(resumed) == weights(whole)


def test_a_value_that_is_not_logged_ends_the_run_once_it_is_saved(tmp_path: Path) -> None:
    saved = {"checkpoint": CheckpointConfig(every=100, best=0), "run_dir": tmp_path}
    task = Regression(factory(PLATEAU, metric="validation/los"))
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau watches 'validation/los'.*'validation/loss'"):
        rates(task, pairs(4), **saved)
    assert (tmp_path / "checkpoints" / "update-00000005").is_dir()
    optional = Regression(factory(PLATEAU, metric="validation/los", required=False))
    assert rates(optional, pairs(4), max_epochs=2) == [0.8] * 10


def test_a_schedule_that_could_never_act_is_refused_before_training() -> None:
    with pytest.raises(
        ConfigError, match=r"watches 'validation/loss' at each validation.*no validation data"
    ):
        rates(Regression(factory(PLATEAU, metric="validation/loss")))


def test_what_is_no_schedule_is_refused_with_what_to_write() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for message, attempt in {
        "steps or whole epochs": lambda: TorchSchedule(StepLR(optimizer, 1), every="0.5 epochs"),
        "'10 minutes'": lambda: TorchSchedule(StepLR(optimizer, 1), every="10 minutes"),
        "metric='validation/loss'": lambda: TorchSchedule(ReduceLROnPlateau(optimizer)),
        "needs the name": lambda: TorchSchedule(functools.partial(ReduceLROnPlateau, patience=1)),
        "StepLR.step takes none": lambda: TorchSchedule(StepLR(optimizer, 1), metric="validation/loss"),
        "takes a value's name": lambda: TorchSchedule(ReduceLROnPlateau, metric=3),  # type: ignore[arg-type]
        "required=. must be True or False": lambda: TorchSchedule(StepLR, required="no"),  # type: ignore[arg-type]
        "it was given a str": lambda: TorchSchedule("cosine").made(optimizer),
        "'monitor'. Here it is called 'metric'": lambda: TorchSchedule(StepLR, monitor="validation/loss"),  # type: ignore[call-arg]
        "no state_dict": lambda: TorchSchedule(Stepping()).made(optimizer),
        "another optimizer": lambda: rates(Regression(factory(lambda _: StepLR(optimizer, 1)))),
    }.items():
        with pytest.raises(ConfigError, match=message):
            attempt()


class Stepping:
    """Has no state."""

    def step(self) -> None: ...


def _on_two_ranks(strategy: str) -> tuple[list[float], Any]:
    torch.set_num_threads(1)
    task = Regression(factory(PLATEAU, metric="validation/loss"))
    return rates(task, pairs(4), strategy=strategy, max_epochs=3), weights(task)


def test_ranks_follow_the_same_validations() -> None:
    (first, one), (second, other) = run_distributed(_on_two_ranks, "ddp", timeout=120)
    assert first == second == [0.8] * 6 + [0.4] * 3
    assert one == other
