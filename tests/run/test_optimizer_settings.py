"""A resume whose optimizer or schedule has other settings: refused, or taken over where it is asked for."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, CyclicLR, ExponentialLR, OneCycleLR, SequentialLR, StepLR

from drivetrain import (
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    LambdaCallback,
    OptimizerConfig,
    TaskModule,
    TorchSchedule,
    world_size,
)


def configured(**changed: Any) -> OptimizerConfig:
    options = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.9, 0.99), "decay_all": True, **changed}
    return OptimizerConfig("adamw", **options)


def stepped(lr: float = 0.1, gamma: float = 0.5) -> Any:
    def make(parameters: Any) -> Any:
        optimizer = SGD(parameters, lr=lr)
        return optimizer, TorchSchedule(StepLR(optimizer, 1, gamma), every="1 epoch")

    return make


def fit(folder: Path, optimizer: Any, **resume: Any) -> dict[str, Any]:
    """Return the settings of a fit's optimizer at its end, two epochs on in a resume."""
    groups: list[dict[str, Any]] = []
    keeps = LambdaCallback(
        on_fit_end=lambda run: groups.extend(run.engine.updaters["default"].optimizer.param_groups)
    )
    options = {
        "checkpoint": True,
        "loggers": "csv",
        "run_dir": folder,
        "callbacks": [keeps],
        "max_epochs": 3 if resume else 1,
    }
    quiet(**options).fit(Regression(optimizer), pairs(4), **resume)
    return groups[0]


def test_a_resume_with_other_settings_is_refused_or_overrides(tmp_path: Path) -> None:
    ours, torchs = tmp_path / "ours", tmp_path / "torch's"
    fit(ours, configured())
    fit(torchs, stepped())
    changed = {"lr": 1e-3, "weight_decay": 0.5, "betas": (0.5, 0.9)}

    def resumed(folder: Path, optimizer: Any, **options: Any) -> Any:
        return lambda: fit(folder, optimizer, resume="auto", **options)

    table: dict[str, tuple[Any, ...]] = {
        name: (resumed(ours, configured(**{name: value})), f"{name} was", "optimizer_settings='program'")
        for name, value in {**changed, "schedule": "linear"}.items()
    }
    table["gamma"] = (resumed(torchs, stepped(gamma=0.1)), "gamma was 0.5 and is now 0.1")
    table["rate"] = (resumed(torchs, stepped(lr=0.2)), "lr was 0.1 and is now 0.2")
    table["part"] = (resumed(ours, configured(), optimizer_settings="data"), "'program'")
    table["fresh"] = (
        lambda: quiet(max_epochs=1).fit(Regression(), pairs(4), optimizer_settings="program"),
        "resume",
    )
    assert_refused(ConfigError, table)

    group = resumed(ours, configured(**changed), optimizer_settings="program")()
    assert {name: group[name] for name in changed} == changed
    group = resumed(torchs, stepped(lr=0.4, gamma=0.25), optimizer_settings="program")()
    assert group["lr"] == pytest.approx(0.4 * 0.5 * 0.25**2)  # the first epoch had the old factor


def scaled(folder: Path, **resume: Any) -> dict[str, Any]:
    options: Any = {"strategy": "ddp" if world_size() > 1 else "auto", "devices": world_size()}
    trainer = quiet(max_epochs=2, checkpoint=True, loggers="csv", run_dir=folder, **options)
    return trainer.fit(Regression(configured(lr=0.1 * world_size())), pairs(8), **resume).metrics


def joined(gamma: float) -> Any:
    def make(optimizer: Any) -> Any:
        return SequentialLR(optimizer, [ConstantLR(optimizer, 1.0), ExponentialLR(optimizer, gamma)], [2])

    return make


SCHEDULES: dict[str, tuple[Any, Any, str]] = {
    "inner": (joined(0.9), joined(0.5), "_schedulers.1.gamma was 0.9 and is now 0.5"),
    "phases": (
        lambda own: OneCycleLR(own, 1.0, total_steps=20, cycle_momentum=False),
        lambda own: OneCycleLR(own, 1.0, total_steps=12, cycle_momentum=False),
        "total_steps was 20 and is now 12",
    ),
    "function": (
        lambda own: CyclicLR(own, 0.1, 0.8, 3, cycle_momentum=False),
        lambda own: CyclicLR(own, 0.1, 0.8, 3, mode="triangular2", cycle_momentum=False),
        "mode was 'triangular'",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_setting_within_a_scheduler_is_named_and_takes_effect(name: str, tmp_path: Path) -> None:
    def scheduled(make: Any) -> Any:
        def both(parameters: Any) -> Any:
            optimizer = SGD(parameters, lr=0.1)
            return optimizer, make(optimizer)

        return both

    before, now, text = SCHEDULES[name]
    fit(tmp_path / "here", scheduled(before))
    with pytest.raises(ConfigError, match=re.escape(text)):
        fit(tmp_path / "here", scheduled(now), resume="auto")
    group = fit(tmp_path / "here", scheduled(now), resume="auto", optimizer_settings="program")
    if name != "inner":  # its rate depends on the one before, and not only on the number of the step
        fit(tmp_path / "pure", scheduled(now))
        pure = fit(tmp_path / "pure", scheduled(now), resume="auto")
        assert group["lr"] == pytest.approx(pure["lr"])
    fit(tmp_path / "here", scheduled(now), resume="auto")  # the checkpoint records what was used


def test_a_resume_keeps_the_checkpoints_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, stepped())
    group = fit(tmp_path, stepped(lr=0.4, gamma=0.25), resume="auto", optimizer_settings="checkpoint")
    assert group["lr"] == 0.1 * 0.5**3
    assert "lr was 0.1 and is now 0.4" in caplog.text
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["kept_of_checkpoint"]["default"]["0 lr"] == "0.1"
    fit(tmp_path, stepped(), resume="auto")  # the checkpoint records what was used
    caplog.set_level("INFO")  # of a formula there is nothing to keep, and the user is told
    fit(tmp_path / "named", configured(schedule="cosine"))
    fit(tmp_path / "named", configured(schedule="linear"), resume="auto", optimizer_settings="checkpoint")
    assert "goes on with settings that have changed: schedule was 'cosine' and is now 'linear'" in caplog.text


def test_a_decay_ends_in_a_resume(tmp_path: Path) -> None:
    fit(tmp_path, configured(decay_all=False))
    assert_refused(
        CheckpointError,
        {
            "zero": (
                lambda: fit(tmp_path, configured(decay_all=False, weight_decay=0.0), resume="auto"),
                "weight_decay=1e-30",
            )
        },
    )
    ends = configured(decay_all=False, weight_decay=1e-30)
    assert fit(tmp_path, ends, resume="auto", optimizer_settings="program")["weight_decay"] == 1e-30


def test_a_decay_begins_at_the_checkpoint_that_a_longer_or_shorter_run_resumes(tmp_path: Path) -> None:
    """Branches of a stable run: the same program with another max_steps, or with another schedule."""
    decay = {"schedule": "warmup_stable_decay", "schedule_options": {"decay": 4}}

    def moves(folder: str, steps: int, resume: Any = None, how: Any = None, **schedule: Any) -> list[float]:
        config = OptimizerConfig("sgd", lr=0.1, warmup_steps=1, **schedule)
        # The bias moves by the rate.
        task = variant(loss=lambda self, outputs, batch: outputs.mean())(config)
        found: list[float] = []
        options: dict[str, Any] = {"checkpoint": CheckpointConfig(every=2, keep_last=None)}
        trainer = quiet(max_steps=steps, run_dir=tmp_path / folder, **options)
        for _ in trainer.steps(task, pairs(), resume=resume, optimizer_settings=how):
            found.append(task.line.bias.item())
        return [round(before - after, 5) for before, after in pairwise(found)]

    stable = str(tmp_path / "stable" / "checkpoints" / "step-00000006")
    moves("stable", 8, schedule="constant")
    with pytest.raises(ConfigError, match="schedule was 'constant' and is now 'warmup_stable_decay'"):
        moves("refused", 10, stable, **decay)
    assert moves("branch", 10, stable, "program", **decay) == [0.075, 0.05, 0.025]
    moves("long", 12, **decay)
    long = str(tmp_path / "long" / "checkpoints" / "step-00000006")
    assert moves("other", 10, long, **decay) == [0.075, 0.05, 0.025]  # the same program, a shorter run


class Layers(TaskModule):
    """A model whose layers, and its optimizer's groups, are listed in either order."""

    def __init__(self, optimizer: Any, is_reversed: bool) -> None:
        super().__init__()
        self.optimizer, self.is_reversed = optimizer, is_reversed
        made = {"first": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "last": nn.Linear(4, 1)}
        for name in self.listed(made):
            self.add_module(name, made[name])

    def listed(self, of: Any) -> list[Any]:
        return list(reversed(of)) if self.is_reversed else list(of)

    def training_step(self, batch: Any) -> Any:
        return (self.last(self.norm(self.first(batch[0]))) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        if self.optimizer is None:
            return OptimizerConfig("adamw", lr=0.1, weight_decay=0.2, schedule="cosine")
        parts = self.listed([self.first, self.norm, self.last])
        return lambda _: SGD([{"params": part.parameters()} for part in parts], lr=0.1, momentum=0.9)


def test_layers_may_be_listed_in_another_order_and_groups_may_not(tmp_path: Path) -> None:
    def end(folder: str, optimizer: Any, is_reversed: bool, **resume: Any) -> Any:
        task = Layers(optimizer, is_reversed)
        options: Any = {"checkpoint": True, "run_dir": tmp_path / folder}
        trainer = quiet(max_steps=6 if resume else 3, max_epochs=None, **options)
        trainer.fit(task, pairs(12), **resume)
        return weights(task)

    torch.manual_seed(0)
    end("run", None, False)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert end("other", None, True, resume="auto") == end("run", None, False, resume="auto")
    end("groups", "sgd", False)
    with pytest.raises(CheckpointError, match=r"number 0, of .*, here number 2, .*List the groups"):
        end("groups", "sgd", True, resume="auto")
