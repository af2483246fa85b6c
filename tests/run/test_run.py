"""The run: its hooks' table, its log points and their names, and its time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, CheckpointConfig, EarlyStopping, LambdaCallback, OptimizerConfig, ProgressBar
from drivetrain.run.hooks import HOOKS, Hooks

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def test_hooks_that_nobody_overrides_are_not_called() -> None:
    class One(Callback):
        def on_log(self, run: Any) -> None:
            """The only one."""

    hooks = Hooks([Callback(), One(), Callback()])
    assert {name: len(getattr(hooks, name)) for name in HOOKS if getattr(hooks, name)} == {"on_log": 1}


def log_points(log_every: int | str, **options: Any) -> list[tuple[int, dict[str, float]]]:
    points: list[tuple[int, dict[str, float]]] = []
    keep = LambdaCallback(on_log=lambda run: points.append((run.progress.steps, dict(run.logged))))
    callbacks = [*options.pop("callbacks", ()), keep]
    quiet(max_epochs=1, log_every=log_every, callbacks=callbacks, **options).fit(Regression(), pairs())
    return points


def test_what_callbacks_log_joins_the_next_log_point_and_reaches_loggers() -> None:
    log = LambdaCallback(
        on_step_end=lambda run: run.log("steps", run.progress.steps),
        on_log=lambda run: run.log("here", run.task.line.weight.norm()),  # a tensor with a graph
        on_epoch_end=lambda run: run.log("late", 1),
    )
    rows: list[Any] = []
    config: dict[str, Any] = {}
    logger = SimpleNamespace(
        log_metrics=lambda metrics, step: rows.append((step, dict(metrics))),
        log_config=config.update,
        close=lambda: None,
    )
    points = log_points("2 steps", callbacks=[log], loggers=logger)
    assert rows == points
    assert [(step, values["steps"]) for step, values in points] == [(2, 2.0), (4, 4.0), (5, 5.0)]
    assert all(values["here"] > 0 and values["train/loss"] > 0 for _, values in points)
    assert ["late" in values for _, values in points] == [False, False, True]
    assert (config["trainer"]["max_epochs"], config["task"]["class"]) == (1, "Regression")
    # What comes after the last log point is not lost.
    late = LambdaCallback(on_epoch_end=lambda run: run.log("late", 1))
    assert log_points("5 steps", callbacks=[late])[-1] == (5, {"late": 1.0})


class Scores(Callback):  # logs a score of its own at each evaluation: 3, 2, 1, 2, 3
    def __init__(self) -> None:
        self.evaluations = 0

    def on_evaluation_end(self, run: Any) -> None:
        self.evaluations += 1
        run.log(f"{run.stage}/score", abs(self.evaluations - 3) + 1 + run.engine.ranks.rank)


def watched(run_dir: Path, **ranks: Any) -> Any:
    """Return what a fit made of the scores: its stop, best checkpoint, rows with rates, and metrics."""
    plateau = {"metric": "validation/score", "mode": "min", "patience": 0, "factor": 0.5, "threshold": 0.0}
    optimizer = OptimizerConfig("sgd", lr=0.1, schedule="reduce_on_plateau", schedule_options=plateau)
    rows: list[tuple[int, dict[str, float], float]] = []
    keep = LambdaCallback(
        on_log=lambda run: rows.append((run.progress.steps, dict(run.logged), run.learning_rates()["lr"]))
    )
    # The one that logs comes after those that watch.
    callbacks = [EarlyStopping("validation/score", "min", patience=2), keep, Scores()]
    policy = CheckpointConfig(every=None, by="validation/score", mode="min", best=1)
    options = {"log_every": None, "validate_every": "1 epoch", "checkpoint": policy, "run_dir": run_dir}
    trainer = quiet(max_epochs=8, callbacks=callbacks, **options, **ranks)
    result = trainer.fit(Regression(optimizer), pairs(4), pairs(2))
    best = Path(str(result.best_checkpoint)).name
    return result.stop_reason, best, [row for row in rows if "validation/loss" in row[1]], result.metrics


def check_watched(found: Any) -> None:
    stop_reason, best, rows, metrics = found
    assert stop_reason == "early stopping: validation/score did not improve on 1 for 2 evaluations"
    assert [values["validation/score"] for _, values, _ in rows] == [3, 2, 1, 2, 3], "the record of the loss"
    assert [rate for _, _, rate in rows] == [0.1, 0.1, 0.1, 0.05, 0.025]
    assert best.endswith(str(rows[2][0]))
    assert metrics["validation/score"] == 3


def on_a_rank(run_dir: Path) -> Any:
    def add(run: Any) -> None:
        ranks = run.engine.ranks
        run.log("mine", ranks.rank + 0.5)
        run.log(f"of rank {ranks.rank} alone", 1)
        run.log("mean", ranks.total([ranks.rank + 0.5])[0] / ranks.size)

    late = LambdaCallback(on_log=lambda run: run.log("late", run.engine.ranks.rank + 3.0))
    strategy: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    callbacks = [LambdaCallback(on_step_end=add, on_epoch_end=add), late]
    points = [values for _, values in log_points("2 steps", callbacks=callbacks, **strategy)]
    return points, watched(run_dir, **strategy)


@needs_gloo
def test_of_several_ranks_it_is_rank_0_whose_values_are_logged_and_decide(tmp_path: Path) -> None:
    (first, *found), (second, *other) = on_two_ranks(on_a_rank, tmp_path)
    own = {"mine": 0.5, "of rank 0 alone": 1.0, "mean": 1.0, "late": 3.0}
    assert [{name: each[name] for name in each if name != "train/loss"} for each in first] == [own] * 2
    assert [each.pop("late") for each in second] == [4.0] * 2, "until all callbacks have seen the log point"
    assert [{**each, "late": 3.0} for each in second] == first
    for each in (*found, *other):
        check_watched(each)


def test_metrics_timing_and_milestones_of_a_run(tmp_path: Path) -> None:
    parts: dict[str, float] = {}
    seen: list[int] = []
    notes = LambdaCallback(
        on_fit_end=lambda run: parts.update(run.timing),
        on_checkpoint_saved=lambda run: seen.append(run.milestones),
    )
    options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": True, "callbacks": [notes]}
    result = quiet(max_epochs=2, log_every="2 steps", **options).fit(Regression(), pairs(), pairs())
    assert set(result.metrics) == {"train/loss", "validation/loss"}
    assert seen == [7, 14]  # each time five steps, a pass over the validation data, and a checkpoint
    assert set(parts) == {"data", "compute", "evaluation", "save"}
    assert all(seconds > 0 for seconds in parts.values())
    assert result.progress.seconds > 0
    more = LambdaCallback(on_checkpoint_loaded=lambda run: parts.update(run.timing))
    parts.clear()
    quiet(max_epochs=3, **{**options, "callbacks": [more]}).fit(Regression(), pairs(), resume="auto")
    assert all(parts[each] > 0 for each in ("data", "compute", "evaluation"))


# The names of values.

VALIDATION_LOSSES = [3.0, 2.0, 1.0, 2.0, 3.0, 4.0]


# Names its values as transformers' Trainer does; its validation losses are given.
class Evaluated(Regression):
    evaluations = -1

    def configure_optimizers(self) -> OptimizerConfig:
        options = {"metric": "eval_loss", "patience": 0, "factor": 0.5}
        return OptimizerConfig("sgd", lr=0.1, schedule="reduce_on_plateau", schedule_options=options)

    def metric_name(self, stage: str, loader: str | None, name: str) -> str:
        if stage == "train":
            return name
        return f"eval_{name}" if loader is None else f"eval_{loader}_{name}"

    def validation_step(self, batch: Any) -> Any:
        self.evaluations += 1
        return {"loss": torch.tensor(VALIDATION_LOSSES[self.evaluations])}


def test_metric_name_holds_for_results_loggers_and_all_that_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates: list[float] = []
    task = Evaluated()
    note = LambdaCallback(on_log=lambda run: rates.append(run.learning_rates()["lr"]))
    policy = CheckpointConfig(every=None, by="eval_loss", best=1)
    options: dict[str, Any] = {"loggers": "jsonl", "checkpoint": policy, "run_dir": tmp_path}
    # The log interval is much longer than the fit: no name makes it shorter.
    options |= {"callbacks": [EarlyStopping("eval_loss", patience=2), note, ProgressBar()]}
    trainer = quiet(max_epochs=6, log_every="100 steps", validate_every="1 epoch", **options)
    result = trainer.fit(task, pairs(4), pairs(2))
    assert result.stop_reason == "early stopping: eval_loss did not improve on 1 for 2 evaluations"
    assert set(result.metrics) == {"loss", "eval_loss"}
    assert Path(str(result.best_checkpoint)).name.endswith("6")
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.025, 0.025]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [sorted(row) for row in rows] == [["eval_loss", "step"]] * 5 + [["loss", "step"]]
    shown = capsys.readouterr().err
    assert "| loss " in shown
    assert "| eval_loss 3" in shown
    task.evaluations = 0
    values = trainer.test(task, {"near": pairs(2), "far": pairs(2)})
    assert values == {"eval_near_loss": 2.0, "eval_far_loss": 1.0}


def test_the_default_policy_ranks_by_the_loss_and_a_resumed_fit_knows_it_by_its_name(
    tmp_path: Path,
) -> None:
    evaluations: list[int] = []
    count = LambdaCallback(on_evaluation_end=lambda run: evaluations.append(run.progress.steps))
    options: dict[str, Any] = {"callbacks": [count], "checkpoint": True, "run_dir": tmp_path}
    result = quiet(max_epochs=3, **options).fit(Evaluated(), pairs(4), pairs(2))
    assert str(result.best_checkpoint).endswith("6")
    quiet(max_steps=7, **options).fit(Evaluated(), pairs(4), pairs(2), resume="auto")
    assert evaluations == [2, 4, 6], "it has validated already"
