"""Settings of an optimizer, other than the rate, that follow schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import ConfigError, LambdaCallback, LearningRateMonitor, OptimizerConfig, ParameterGroup

STEPS = 8


def ramp(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def configured(**options: Any) -> OptimizerConfig:
    schedules = {"weight_decay": "linear", "momentum": ramp}
    given = {"lr": 0.05, "weight_decay": 0.5, "momentum": 0.9, "schedules": schedules, "total_steps": STEPS}
    return OptimizerConfig("sgd", **{**given, **options})


def by_hand() -> dict[str, Tensor]:
    line = Regression().line
    groups: Any = [{"params": [line.weight], "weight_decay": 0.5}, {"params": [line.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    for step, (features, target) in enumerate([*pairs(16, 4), *pairs(16, 4)]):
        optimizer.param_groups[0]["weight_decay"] = 0.5 * (1 - step / STEPS)
        for group in optimizer.param_groups:
            group["momentum"] = 0.9 * ramp(step)
        optimizer.zero_grad()
        (line(features) - target).square().mean().backward()
        optimizer.step()
    return {f"line.{name}": each.detach() for name, each in line.named_parameters()}


def fitted(batch_size: int = 4, resume: str | None = None, **options: Any) -> Regression:
    task = Regression(configured())
    quiet(**{"max_steps": STEPS, **options}).fit(task, pairs(16, batch_size), resume=resume)
    return task


def assert_as_by_hand(task: Regression) -> None:
    torch.testing.assert_close(dict(task.state_dict()), by_hand(), rtol=0, atol=1e-6)


def test_the_settings_of_each_step_are_those_by_hand_and_a_resume_is_bitwise(tmp_path: Path) -> None:
    assert_as_by_hand(whole := fitted())
    assert_as_by_hand(fitted(2, gradient_accumulation_steps=2))
    saved: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path}
    fitted(max_steps=3, **saved)
    assert weights(fitted(resume="auto", **saved)) == weights(whole)


def test_a_pair_of_settings_follows_a_function_that_gives_two_factors(tmp_path: Path) -> None:
    def cycle(step: int) -> tuple[float, float]:  # as OneCycleLR does with Adam's momentum
        return 1 - 0.1 * min(step, 4) / 4, 1.0

    def fitted(steps: int, **options: Any) -> tuple[Regression, Any]:
        task = Regression(OptimizerConfig("adam", lr=0.05, betas=(0.95, 0.99), schedules={"betas": cycle}))
        trainer = quiet(
            max_steps=steps, checkpoint=True, run_dir=tmp_path, callbacks=[LearningRateMonitor()], log_every=1
        )
        return task, trainer.fit(task, pairs(16, 4), **options).metrics

    line = Regression().line
    optimizer = torch.optim.Adam(line.parameters(), lr=0.05)
    for step, (features, target) in enumerate([*pairs(16, 4), *pairs(16, 4)]):
        optimizer.param_groups[0]["betas"] = (0.95 * cycle(step)[0], 0.99)
        optimizer.zero_grad()
        (line(features) - target).square().mean().backward()
        optimizer.step()
    fitted(3)
    task, metrics = fitted(STEPS, resume="auto")
    torch.testing.assert_close(dict(task.line.state_dict()), dict(line.state_dict()), rtol=0, atol=1e-6)
    assert (metrics["betas.0"], metrics["betas.1"]) == (pytest.approx(0.855), 0.99)


def test_ranks_follow_them_too() -> None:
    def both() -> None:
        for strategy in ("ddp", "fsdp"):
            assert_as_by_hand(fitted(2, strategy=strategy, devices=2))

    on_two_ranks(both)


def test_they_are_logged_and_planned_by_the_groups_that_have_them() -> None:
    group = ParameterGroup("line.bias", weight_decay=0.1)
    task, seen = Regression(configured(groups=group, total_steps=None)), []  # over the run
    note = LambdaCallback(on_log=lambda run: seen.append(dict(run.metrics)))
    trainer = quiet(max_steps=STEPS, log_every=1, callbacks=[LearningRateMonitor(), note])
    found = trainer.plan(task, pairs(16, 4)).rates
    ends = {name: (rate.start, rate.end) for name, rate in found.items()}
    assert ends == {
        "lr": (0.05, 0.05),
        "weight_decay": (0.5, 0.0625),
        "weight_decay/line.bias": (0.1, 0.0125),
        "momentum": (0.225, 0.9),
    }
    metrics = trainer.fit(task, pairs(16, 4)).metrics
    assert {name: metrics[name] for name in ends} == {name: end for name, (_, end) in ends.items()}


def test_a_schedule_that_a_resume_leaves_out_returns_to_the_base_value(tmp_path: Path) -> None:
    def end(config: OptimizerConfig, steps: int, **resume: Any) -> Any:
        found: list[Any] = []
        note = LambdaCallback(
            on_fit_end=lambda run: found.extend(run.engine.updaters["default"].optimizer.param_groups)
        )
        options: dict[str, Any] = {"max_steps": steps, "checkpoint": True, "run_dir": tmp_path}
        quiet(callbacks=[note], **options).fit(Regression(config), pairs(), **resume)
        return found[0]["lr"], found[0]["weight_decay"], found[0]["momentum"]

    assert end(configured(schedule="linear"), 4) == (0.025, 0.25, 0.9)
    with pytest.raises(ConfigError, match=r"schedules was .*'momentum': ramp.* and is now {}"):
        end(configured(schedules={}), 6, resume="auto")
    with_program = {"resume": "auto", "optimizer_settings": "program"}
    assert end(configured(schedules={}, weight_decay=0.4), 6, **with_program) == (0.05, 0.4, 0.9)


def test_refusals_of_schedules_of_settings() -> None:
    def fit(**options: Any) -> Any:
        config = {"weight_decay": 0.1, **options}
        return lambda: quiet(max_steps=1).fit(Regression(OptimizerConfig("adamw", **config)), pairs())

    def made(schedules: Any) -> Any:
        return lambda: OptimizerConfig("adamw", schedules=schedules)

    table = {
        "the rate": (made({"lr": "linear"}), "give schedule= for the rate"),
        "a metric": (made({"weight_decay": "reduce_on_plateau"}), "only the rate"),
        "unknown": (made({"weight_decay": "liner"}), "'weight_decay'", "'linear'"),
        "a number": (made({"weight_decay": 0.1}), "a name or a function"),
        "no mapping": (made("linear"), "{'weight_decay': 'linear'}"),
        "no setting": (fit(schedules={"momentum": "linear"}), "no setting 'momentum'", "'eps'"),
        "no number": (fit(schedules={"foreach": "linear"}), "foreach of the optimizer 'adamw' is None"),
        "a name for a pair": (fit(schedules={"betas": "linear"}), "2 factors", "not 'linear'"),
        "a factor for a pair": (fit(schedules={"betas": lambda step: 0.9}), "2 factors", "not 0.9"),
        "factors for one": (fit(schedules={"eps": lambda step: (1.0, 1.0)}), "one factor, and not (1.0"),
        "zero": (fit(weight_decay=0, schedules={"weight_decay": "linear"}), "Give weight_decay too"),
    }
    assert_refused(ConfigError, table)
