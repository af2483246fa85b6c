"""What `configure_optimizers` may return, the rate at each step, and schedules after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Duel, Regression, pairs, quiet, variant
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from drivetrain import (
    CheckpointError,
    ConfigError,
    LambdaCallback,
    OptimizerConfig,
    ParameterGroup,
    TaskModule,
)


def rates(task: TaskModule, resume: str | None = None, **options: Any) -> list[float]:
    seen: list[float] = []
    note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
    length = {} if "max_steps" in options else {"max_epochs": 1}
    quiet(**{**length, **options, "callbacks": [note]}).fit(task, pairs(10), resume=resume)
    return seen


def made(schedule: Any, **options: Any) -> Any:
    def factory(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.8, momentum=0.5)
        return optimizer, schedule(optimizer, **options)

    return factory


halving = made(StepLR, step_size=2, gamma=0.5)


def test_schedule_gives_the_rate_at_each_of_six_steps_by_hand(tmp_path: Path) -> None:
    """Two steps of warm-up, then a linear decay over the other four; also after a resume."""
    linear = OptimizerConfig("sgd", lr=0.12, schedule="linear", warmup_steps=2)
    by_hand = pytest.approx([0.04, 0.08, 0.12, 0.09, 0.06, 0.03])
    assert rates(Regression(linear), max_steps=6) == by_hand
    assert rates(Regression(linear), max_steps=6, gradient_accumulation_steps=2) == by_hand
    options = {"checkpoint": True, "run_dir": tmp_path}
    given = OptimizerConfig("sgd", lr=0.12, schedule="linear", warmup_steps=2, total_steps=6)
    first = rates(Regression(given), max_steps=3, **options)
    assert first + rates(Regression(given), max_steps=6, resume="auto", **options) == by_hand
    # What each step has moved a weight by: the rate that was used, not the one shown.
    moves: list[float] = []
    task = variant(loss=lambda self, outputs, batch: self.line.bias.sum())(linear)
    bias = task.line.bias.item()
    for _ in quiet(max_steps=6).steps(task, pairs()):
        moves.append(bias - task.line.bias.item())
        bias = task.line.bias.item()
    assert moves == pytest.approx([0.04, 0.08, 0.12, 0.09, 0.06, 0.03], abs=1e-6)


def test_factory_gets_the_trainable_parameters_and_reports_the_rate_of_each_group() -> None:
    given: list[list[nn.Parameter]] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given.append(parameters)
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1)

    task = Regression(factory)
    task.more = nn.Linear(1, 1)
    task.more.requires_grad_(False)
    seen: list[dict[str, float]] = []
    note = LambdaCallback(on_step_end=lambda run: seen.append(run.learning_rates()))
    quiet(max_steps=1, callbacks=[note]).fit(task, pairs())
    assert [id(each) for each in given[0]] == [id(task.line.weight), id(task.line.bias)]
    assert seen == [{"lr/0": 0.1, "lr/1": 0.5}]


def named(*groups: ParameterGroup) -> OptimizerConfig:
    return OptimizerConfig("adamw", lr=0.1, schedule="linear", groups=groups)


def two(**name: str) -> Any:
    def make(parameters: list[nn.Parameter]) -> Any:
        groups = [{"params": part, **name} for part in (parameters[:2], parameters[2:])]
        groups[0] |= dict.fromkeys(name, "the *first*")
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda n: 0.5**n])

    return make


@pytest.mark.parametrize(
    ("configured", "names"),
    [
        (named(), {"lr"}),
        (named(ParameterGroup("line.*", weight_decay=0.0)), {"lr"}),
        (named(ParameterGroup("more.*", lr=0.3)), {"lr", "lr/more"}),
        (named(ParameterGroup("line*", lr=1.0), ParameterGroup("*", lr=2.0)), {"lr/line", "lr/1"}),
        (two(), {"lr/line", "lr/more"}),
        (two(name="second"), {"lr/the_first", "lr/second"}),
    ],
)
def test_names_of_rates_say_the_group_and_stay_when_rates_are_equal(configured: Any, names: set[str]) -> None:
    task = Regression(configured)
    task.more = nn.Linear(1, 1)
    seen = [{*quiet(max_steps=3).plan(task, pairs()).rates}]
    note = LambdaCallback(on_log=lambda run: seen.append({*run.learning_rates()}))
    quiet(max_steps=3, log_every="1 steps", callbacks=[note]).fit(task, pairs())
    assert len(seen) > 3
    assert all(each == names for each in seen)


class Experts(TaskModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = {"lr": 0.05, "momentum": 0.9, **options}
        self.trunk, self.experts = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        outputs: torch.Tensor = self.experts[expert](torch.tanh(self.trunk(x)))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs - batch["y"]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", **self.options)


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.1}, {"maximize": True}])
def test_sgd_with_momentum_takes_first_gradients_that_come_late_or_never(options: dict[str, Any]) -> None:
    task, plain = Experts(**options), Experts(**options)
    optimizer = torch.optim.SGD(plain.parameters(), fused=False, **plain.options)
    data = [{"x": torch.randn(8, 4), "y": torch.randn(8, 1), "expert": each} for each in (0, 0, 1, 0, 1)]
    for batch in data:
        plain.loss(plain(batch["x"], batch["expert"]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    quiet(max_epochs=1).fit(task, data)
    for found, expected in zip(task.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_torch_schedule_is_not_moved_by_a_skipped_step() -> None:
    seen: list[tuple[bool, float]] = []
    note = LambdaCallback(
        on_step_end=lambda run: seen.append((run.result.applied, run.learning_rates()["lr"]))
    )
    batch = next(iter(pairs()))
    # The first loss scale of 2**16 is too high for this loss.
    quiet(max_steps=4, precision="16-mixed", callbacks=[note]).fit(Regression(halving), [batch])
    assert seen[0] == (False, 0.8)
    assert [rate for applied, rate in seen if applied] == pytest.approx([0.8, 0.4, 0.4, 0.2])


def test_plateau_schedule_goes_on_after_a_resume(tmp_path: Path) -> None:
    options = {"schedule": "reduce_on_plateau", "schedule_options": {"patience": 1, "factor": 0.5}}
    stuck = variant(validation_step=lambda self, batch: torch.tensor(1.0))

    def run(epochs: int, **saved: Any) -> list[float]:
        seen: list[float] = []
        note = LambdaCallback(on_epoch_start=lambda run: seen.append(run.learning_rates()["lr"]))
        task = stuck(OptimizerConfig("sgd", lr=0.1, **options))
        trainer = quiet(max_epochs=epochs, callbacks=[note], **saved)
        trainer.fit(task, pairs(4), pairs(2), resume="auto" if saved else None)
        return seen

    saved = {"checkpoint": True, "run_dir": tmp_path}
    assert run(2, **saved) + run(6, **saved) == run(6)


def test_refusals_of_configure_optimizers(tmp_path: Path) -> None:
    def fit(given: Any) -> Any:
        task = given if isinstance(given, TaskModule) else variant(configure_optimizers=lambda self: given)()
        return lambda: quiet(max_epochs=1).fit(task, pairs())

    early = variant(configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1))()

    def resumed() -> None:
        plain = Regression(lambda params: torch.optim.SGD(params, lr=0.8, momentum=0.5))
        quiet(max_epochs=2, **options).fit(plain, pairs(), resume="auto")

    options = {"checkpoint": True, "run_dir": tmp_path}
    quiet(max_epochs=1, **options).fit(Regression(halving), pairs())
    misspelt = Duel({"discriminator": OptimizerConfig("sgd"), "generater": OptimizerConfig("sgd")})
    cases: dict[str, tuple[Any, ...]] = {
        "built early": (fit(early), "too early", "lambda params: torch.optim.SGD(params"),
        "nothing": (fit({}), "empty mapping"),
        "no return": (fit(None), "is a `return` missing"),
        "a text by name": (fit({"line": "adamw"}), "'line'", "OptimizerConfig"),
        "plateau": (fit(made(ReduceLROnPlateau)), "schedule='reduce_on_plateau'"),
        "no such submodule": (fit(misspelt), "'generater'"),
        "another kind of schedule in the checkpoint": (resumed, "schedule"),
    }
    assert_refused((ConfigError, CheckpointError), cases)
