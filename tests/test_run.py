"""The run: its hooks' table, its log points, and its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, ConfigError, LambdaCallback, Trainer
from drivetrain.hooks import HOOKS, Hooks
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed


class Misspelt(Callback):
    def on_step_ends(self, run: Any) -> None:
        """Never called."""


def test_a_misspelt_hook_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Misspelt\.on_step_ends is no hook.*Did you mean 'on_step_end'"):
        Trainer(max_epochs=1, callbacks=[Misspelt()])


class Ported(Callback):
    def on_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # type: ignore[override]
        """As Lightning calls it."""


def test_a_hook_that_asks_for_more_than_the_run_is_refused_before_the_fit() -> None:
    with pytest.raises(ConfigError, match=r"Ported\.on_epoch_end\(trainer, pl_module\) cannot be called"):
        Trainer(max_epochs=1, callbacks=[Ported()])
    with pytest.raises(ConfigError, match=r"Write it as `def on_log\(self, run\)`"):
        Trainer(max_epochs=1, callbacks=[LambdaCallback(on_log=lambda: None)])  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("wrong", [object(), "early_stopping", 3])
def test_what_has_no_hook_is_no_callback(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="callback"):
        Trainer(max_epochs=1, callbacks=[wrong])


def test_any_object_with_hooks_is_a_callback() -> None:
    class Plain:
        def __init__(self) -> None:
            self.updates: list[int] = []

        def on_step_end(self, run: Any) -> None:
            self.updates.append(run.progress.updates)

    plain = Plain()
    quiet(max_steps=2, callbacks=[plain]).fit(Regression(), pairs())
    assert plain.updates == [1, 2]


def test_a_hook_that_nobody_overrides_is_in_no_table() -> None:
    class One(Callback):
        def on_log(self, run: Any) -> None:
            """The only one."""

    hooks = Hooks([Callback(), One(), Callback()])
    assert {name: len(getattr(hooks, name)) for name in HOOKS if getattr(hooks, name)} == {"on_log": 1}


def log_points(*callbacks: Any, **options: Any) -> list[dict[str, float]]:
    points: list[dict[str, float]] = []
    keep = LambdaCallback(on_log=lambda run: points.append(dict(run.logged)))
    trainer = quiet(**{"max_epochs": 1, **options, "callbacks": [*callbacks, keep]})
    trainer.fit(Regression(), pairs())
    return points


def test_what_a_callback_logs_joins_the_next_log_point() -> None:
    log = LambdaCallback(on_step_end=lambda run: run.log("updates", run.progress.updates))
    points = log_points(log, log_every="2 steps")
    assert [point["updates"] for point in points] == [2.0, 4.0, 5.0]
    assert all("train/loss" in point for point in points)


def test_what_is_logged_at_a_log_point_joins_that_one() -> None:
    log = LambdaCallback(on_log=lambda run: run.log("here", 1))
    assert all(point["here"] == 1.0 for point in log_points(log, log_every="2 steps"))


def test_a_logged_tensor_with_several_numbers_is_refused_by_its_name() -> None:
    log = LambdaCallback(on_step_end=lambda run: run.log("several", torch.ones(2)))
    with pytest.raises(ConfigError, match=r"run\.log\('several', \.\.\.\) takes one number, .* shape \(2,\)"):
        log_points(log)


def test_what_is_logged_after_the_last_log_point_is_not_lost() -> None:
    log = LambdaCallback(on_epoch_end=lambda run: run.log("late", 1))
    assert log_points(log, log_every="5 steps")[-1] == {"late": 1.0}


def logged_on_a_rank() -> list[dict[str, float]]:
    def add(run: Any) -> None:
        ranks = run.engine.ranks
        run.log("mine", ranks.rank + 0.5)
        run.log(f"of rank {ranks.rank} alone", 1)
        run.log("mean", ranks.total([ranks.rank + 0.5])[0] / ranks.size)

    def add_late(run: Any) -> None:
        run.log("late", run.engine.ranks.rank + 3.0)

    strategy = {"strategy": DDP(world_size=2), "devices": 2, "log_every": "2 steps"}
    callbacks = [LambdaCallback(on_step_end=add, on_epoch_end=add), LambdaCallback(on_log=add_late)]
    return log_points(*callbacks, **strategy)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_of_several_ranks_it_is_rank_0_whose_values_are_logged() -> None:
    first, second = run_distributed(logged_on_a_rank)
    own = {"mine": 0.5, "of rank 0 alone": 1.0, "mean": 1.0, "late": 3.0}
    assert [{name: each[name] for name in each if name != "train/loss"} for each in first] == [own] * 2
    assert [each.pop("late") for each in second] == [4.0] * 2, "until all callbacks have seen the log point"
    assert [{**each, "late": 3.0} for each in second] == first


def test_loggers_get_what_callbacks_added_and_the_number_of_updates() -> None:
    class Keeping:
        def __init__(self) -> None:
            self.rows: list[tuple[int, dict[str, float]]] = []
            self.config: dict[str, Any] = {}
            self.closed = 0

        def log_metrics(self, metrics: Any, step: int) -> None:
            self.rows.append((step, dict(metrics)))

        def log_config(self, config: Any) -> None:
            self.config = dict(config)

        def close(self) -> None:
            self.closed += 1

    logger = Keeping()
    add = LambdaCallback(on_log=lambda run: run.log("extra", 7))
    quiet(max_epochs=1, log_every="2 steps", loggers=logger, callbacks=[add]).fit(Regression(), pairs())
    assert [step for step, _ in logger.rows] == [2, 4, 5]
    assert all(set(row) == {"train/loss", "extra"} for _, row in logger.rows)
    assert logger.config["trainer"]["max_epochs"] == 1
    assert logger.config["task"]["class"] == "Regression"
    assert logger.closed >= 1


def test_the_latest_value_of_every_name_stays_in_the_runs_metrics() -> None:
    result = quiet(max_epochs=2, log_every="2 steps").fit(Regression(), pairs(), pairs(4))
    assert set(result.metrics) == {"train/loss", "validation/loss"}


def test_the_time_of_a_run_is_split_into_its_parts(tmp_path: Path) -> None:
    parts: dict[str, float] = {}
    keep = LambdaCallback(on_fit_end=lambda run: parts.update(run.timing))
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path, callbacks=[keep])
    result = trainer.fit(Regression(), pairs(), pairs(4))
    assert set(parts) == {"data", "compute", "evaluation", "save"}
    assert all(seconds > 0 for seconds in parts.values())
    assert result.progress.seconds > 0


def test_a_step_can_be_read_after_it_was_made() -> None:
    steps = list(quiet(max_epochs=1, max_grad_norm=1.0).steps(Regression(), pairs()))
    assert [step.update for step in steps] == [0, 1, 2, 3, 4]
    assert all(step.applied for step in steps)
    assert steps[0].metrics == {"loss": steps[0].loss}
    assert steps[0].loss > steps[-1].loss


def test_what_moves_between_two_updates_is_counted(tmp_path: Path) -> None:
    seen: list[int] = []
    notes = LambdaCallback(on_checkpoint_saved=lambda run: seen.append(run.milestones))
    options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": True, "callbacks": [notes]}
    quiet(max_epochs=2, **options).fit(Regression(), pairs(), pairs())
    assert seen == [7, 14]  # each time five updates, a pass over the validation data, and a checkpoint
