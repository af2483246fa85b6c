"""The run: its hooks' table, its log points, and its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import (
    Callback,
    CheckpointConfig,
    ConfigError,
    EarlyStopping,
    LambdaCallback,
    OptimizerConfig,
    Trainer,
)
from drivetrain.run.hooks import HOOKS, Hooks
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


class Scores(Callback):
    """Logs a score of its own at each evaluation: 3, 2, 1, 2, ..."""

    def __init__(self) -> None:
        self.evaluations = 0

    def on_evaluation_end(self, run: Any) -> None:
        self.evaluations += 1
        run.log(f"{run.stage}/score", abs(self.evaluations - 3) + 1 + run.engine.ranks.rank)


def watched_on_a_rank(run_dir: Path) -> Any:
    """Return what a fit made of the scores: its stop, best checkpoint, rows with rates, and metrics."""
    plateau = {"metric": "validation/score", "patience": 0, "factor": 0.5, "threshold": 0.0}
    optimizer = OptimizerConfig("sgd", lr=0.1, schedule="reduce_on_plateau", schedule_options=plateau)
    rows: list[tuple[int, dict[str, float], float]] = []
    keep = LambdaCallback(
        on_log=lambda run: rows.append((run.progress.updates, dict(run.logged), run.learning_rates()["lr"]))
    )
    ranks = {"strategy": DDP(world_size=2), "devices": 2} if torch.distributed.is_initialized() else {}
    result = quiet(
        max_epochs=8,
        log_every=None,
        validate_every="1 epoch",
        # The one that logs comes after those that watch.
        callbacks=[EarlyStopping("validation/score", patience=2), keep, Scores()],
        checkpoint=CheckpointConfig(every=None, by="validation/score", best=1),
        run_dir=run_dir,
        **ranks,
    ).fit(Regression(optimizer), pairs(4), pairs(2))
    best = Path(str(result.best_checkpoint)).name
    return result.stop_reason, best, [row for row in rows if "validation/loss" in row[1]], result.metrics


def check_watched(found: Any) -> None:
    stop_reason, best, rows, metrics = found
    assert stop_reason == "early stopping: validation/score did not improve on 1 for 2 evaluations"
    updates = [at for at, _, _ in rows]
    assert [values["validation/score"] for _, values, _ in rows] == [3, 2, 1, 2, 3], "the record of the loss"
    assert [rate for _, _, rate in rows] == [0.1, 0.1, 0.1, 0.05, 0.025]
    assert best.endswith(str(updates[2]))
    assert metrics["validation/score"] == 3


def test_what_is_logged_during_an_evaluation_decides_as_its_own_values_do(tmp_path: Path) -> None:
    check_watched(watched_on_a_rank(tmp_path))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_of_several_ranks_it_is_rank_0_whose_evaluation_decides(tmp_path: Path) -> None:
    for found in run_distributed(watched_on_a_rank, tmp_path):
        check_watched(found)


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_an_evaluation_outside_a_fit_returns_what_callbacks_logged_in_it(stage: str) -> None:
    batches: list[int] = []

    def count(run: Any) -> None:
        batches.append(run.evaluation.batch)
        run.log("batches", len(batches))

    trainer = quiet(callbacks=[LambdaCallback(on_evaluation_step_end=count), Scores()])
    verb = trainer.validate if stage == "validation" else trainer.test
    values = verb(Regression(), pairs(4))
    assert list(values) == [f"{stage}/loss", "batches", f"{stage}/score"]
    assert (values["batches"], values[f"{stage}/score"]) == (len(batches), 3)


def test_what_is_logged_during_an_evaluation_waits_for_no_other_log_point(tmp_path: Path) -> None:
    """Values that were logged before it, for the next log point, do not count as the evaluation's."""
    seen: list[list[str]] = []
    log = LambdaCallback(
        on_step_end=lambda run: run.log("pending", 1),
        on_evaluation_end=lambda run: run.log("score", 1),
        on_log=lambda run: seen.append(sorted(run.evaluation.values) + sorted(run.logged)),
    )
    quiet(max_steps=2, log_every=None, validate_every="1 steps", callbacks=[log]).fit(
        Regression(), pairs(), pairs(2)
    )
    assert seen[0] == ["score", "validation/loss", "pending", "score", "validation/loss"]


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
