"""What `configure_optimizers` may return, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, pairs, quiet
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from drivetrain import CheckpointError, ConfigError, LambdaCallback, OptimizerConfig, TaskModule


def rates(task: TaskModule, **options: Any) -> list[float]:
    """The learning rate of each update."""
    seen: list[float] = []
    note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
    quiet(**{"max_epochs": 1, **options, "callbacks": [note]}).fit(task, pairs(10))
    return seen


def test_an_optimizer_that_was_built_early_is_refused_with_what_to_write() -> None:
    class Early(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ConfigError, match=r"too early.*lambda params: torch\.optim\.SGD\(params"):
        quiet(max_epochs=1).fit(Early(), pairs())


def test_a_factory_gets_the_trainable_parameters() -> None:
    given: list[list[nn.Parameter]] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given.append(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    task = Regression(factory)
    task.line.bias.requires_grad_(False)
    bias = task.line.bias.detach().clone()
    quiet(max_epochs=1).fit(task, pairs())
    assert [id(each) for each in given[0]] == [id(task.line.weight)]
    assert torch.equal(task.line.bias, bias)


def test_a_factory_equals_the_configuration_that_says_the_same() -> None:
    first = Regression(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    second = Regression(OptimizerConfig("sgd", lr=0.05, momentum=0.9))
    for task in (first, second):
        quiet(max_epochs=2).fit(task, pairs())
    assert torch.allclose(first.line.weight, second.line.weight)


def halving(parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, StepLR]:
    optimizer = torch.optim.SGD(parameters, lr=0.8, momentum=0.5)
    return optimizer, StepLR(optimizer, step_size=2, gamma=0.5)


def test_a_torch_schedule_is_stepped_once_an_update() -> None:
    assert rates(Regression(halving)) == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2])
    # Five micro-batches are three updates.
    assert rates(Regression(halving), gradient_accumulation_steps=2) == pytest.approx([0.8, 0.8, 0.4])


def test_a_torch_schedule_goes_on_after_a_resume(tmp_path: Path) -> None:
    whole = Regression(halving)
    right = rates(whole, max_epochs=2)
    options = {"checkpoint": True, "run_dir": tmp_path}
    first = rates(Regression(halving), max_steps=3, **options)
    seen: list[float] = []
    note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
    task = Regression(halving)
    quiet(max_epochs=2, callbacks=[note], **options).fit(task, pairs(10), resume="auto")
    assert first + seen == right
    assert weights(task) == weights(whole)


def test_a_skipped_update_does_not_move_a_torch_schedule() -> None:
    seen: list[tuple[bool, float]] = []
    note = LambdaCallback(on_step_end=lambda run: seen.append((run.step.applied, run.learning_rates()["lr"])))
    batch = next(iter(pairs()))
    # The first loss scale of 2**16 is too high for this loss.
    quiet(max_steps=4, precision="16-mixed", callbacks=[note]).fit(Regression(halving), [batch])
    assert seen[0] == (False, 0.8)
    assert [rate for applied, rate in seen if applied] == pytest.approx([0.8, 0.4, 0.4, 0.2])


def test_a_one_cycle_schedule_of_torch_works() -> None:
    def factory(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return optimizer, OneCycleLR(optimizer, max_lr=0.5, total_steps=6)

    seen = rates(Regression(factory))
    assert max(seen) > 0.4
    assert seen[0] < 0.1
    assert seen[-1] < seen[2]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda params: None, "returned a NoneType; it must return an optimizer"),
        (lambda params: (torch.optim.SGD(params, lr=1.0), "cosine"), "must be a torch.optim.lr_scheduler"),
        (
            lambda params: (lambda o: (o, ReduceLROnPlateau(o)))(torch.optim.SGD(params, lr=1.0)),
            "schedule='reduce_on_plateau'",
        ),
    ],
    ids=["nothing", "a word", "plateau"],
)
def test_a_factory_that_makes_something_else_is_refused(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_epochs=1).fit(Regression(made), pairs())


class Returning(Regression):
    """Configures what it is given."""

    def __init__(self, configured: Any) -> None:
        super().__init__()
        self.configured = configured

    def configure_optimizers(self) -> Any:
        return self.configured


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (None, "returned a NoneType; allowed are"),
        ("adamw", "returned a str; allowed are"),
        ({}, "empty mapping"),
        ({1: OptimizerConfig("sgd")}, "name must be a text"),
        ({"line": "adamw"}, "returned a str for 'line'; allowed are an OptimizerConfig, or a function"),
        ({"line": lambda params: None}, "it must return an optimizer"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(configured: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_epochs=1).fit(Returning(configured), pairs())


def test_a_named_optimizer_without_parameters_is_refused_with_the_submodules_names() -> None:
    task = Duel({"discriminator": OptimizerConfig("sgd"), "generater": OptimizerConfig("sgd")})
    with pytest.raises(ConfigError, match=r"'generater'.*'generator', 'discriminator'"):
        quiet(max_epochs=1).fit(task, pairs())


def test_a_checkpoint_of_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    options = {"checkpoint": True, "run_dir": tmp_path}
    quiet(max_epochs=1, **options).fit(Regression(halving), pairs())
    plain = Regression(lambda params: torch.optim.SGD(params, lr=0.8, momentum=0.5))
    with pytest.raises(CheckpointError, match="schedule"):
        quiet(max_epochs=2, **options).fit(plain, pairs(), resume="auto")


def test_a_plateau_schedule_goes_on_after_a_resume(tmp_path: Path) -> None:
    class Stuck(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            return torch.tensor(1.0)

    optimizer = OptimizerConfig(
        "sgd", lr=0.1, schedule="reduce_on_plateau", schedule_options={"patience": 1, "factor": 0.5}
    )

    def run(epochs: int, **options: Any) -> list[float]:
        seen: list[float] = []
        note = LambdaCallback(on_epoch_start=lambda run: seen.append(run.learning_rates()["lr"]))
        trainer = quiet(max_epochs=epochs, callbacks=[note], **options)
        trainer.fit(Stuck(optimizer), pairs(4), pairs(2), resume="auto" if options else None)
        return seen

    saved = {"checkpoint": True, "run_dir": tmp_path}
    assert run(2, **saved) + run(6, **saved) == run(6)


def test_groups_with_different_rates_are_reported_each() -> None:
    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1)

    seen: list[dict[str, float]] = []
    note = LambdaCallback(on_step_end=lambda run: seen.append(run.learning_rates()))
    quiet(max_steps=1, callbacks=[note]).fit(Regression(factory), pairs())
    assert seen == [{"lr/0": 0.1, "lr/1": 0.5}]


def test_a_lambda_schedule_can_be_saved(tmp_path: Path) -> None:
    def factory(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return optimizer, LambdaLR(optimizer, lambda update: 1 / (1 + update))

    options = {"checkpoint": True, "run_dir": tmp_path}
    quiet(max_steps=2, **options).fit(Regression(factory), pairs())
    seen: list[float] = []
    note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
    quiet(max_steps=4, callbacks=[note], **options).fit(Regression(factory), pairs(), resume="auto")
    assert seen == pytest.approx([0.1 / 3, 0.1 / 4])
