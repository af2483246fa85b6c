"""The names of a run's values: as the task names them, in everything that reads or writes them."""

from __future__ import annotations

import json
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
    ProgressBar,
    StepOutput,
)

VALIDATION_LOSSES = [3.0, 2.0, 1.0, 2.0, 3.0, 4.0]


class Evaluated(Regression):
    """Names its values as transformers' Trainer does; its validation losses are given."""

    def __init__(self) -> None:
        super().__init__(
            OptimizerConfig(
                "sgd",
                lr=0.1,
                schedule="reduce_on_plateau",
                schedule_options={"metric": "eval_loss", "patience": 0, "factor": 0.5},
            )
        )
        self.evaluations = -1

    def metric_name(self, stage: str, loader: str | None, name: str) -> str:
        if stage == "train":
            return name
        return f"eval_{name}" if loader is None else f"eval_{loader}_{name}"

    def validation_step(self, batch: Any) -> Any:
        self.evaluations += 1
        return {"loss": torch.tensor(VALIDATION_LOSSES[self.evaluations])}


def test_a_task_names_its_values_for_results_loggers_and_all_that_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates: list[float] = []
    task = Evaluated()
    trainer = quiet(
        max_epochs=6,
        log_every="100 steps",  # much longer than the fit: no name makes it shorter
        validate_every="1 epoch",
        loggers="jsonl",
        callbacks=[
            EarlyStopping("eval_loss", patience=2),
            LambdaCallback(on_log=lambda run: rates.append(run.learning_rates()["lr"])),
            ProgressBar(),
        ],
        checkpoint=CheckpointConfig(every=None, by="eval_loss", best=1),
        run_dir=tmp_path,
    )
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


def test_the_default_policy_ranks_by_the_loss_as_the_task_names_it(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=3, checkpoint=True, run_dir=tmp_path)
    assert str(trainer.fit(Evaluated(), pairs(4), pairs(2)).best_checkpoint).endswith("6")


def test_a_resumed_fit_knows_that_it_has_validated(tmp_path: Path) -> None:
    evaluations: list[int] = []
    count = LambdaCallback(on_evaluation_end=lambda run: evaluations.append(run.progress.updates))
    options = {"validate_every": "1 epoch", "callbacks": [count], "checkpoint": True, "run_dir": tmp_path}
    quiet(max_steps=2, **options).fit(Evaluated(), pairs(4), pairs(2))
    quiet(max_steps=3, **options).fit(Evaluated(), pairs(4), pairs(2), resume="auto")
    assert evaluations == [2]


def test_a_watched_name_that_no_stage_gives_ends_the_run_once_both_have_given_theirs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "log_every": 3, "checkpoint": False, "run_dir": tmp_path}
    with pytest.raises(
        ConfigError, match=r"watches 'eval_los', which is not logged. Did you mean 'eval_loss'"
    ):
        quiet(callbacks=[EarlyStopping("eval_los")], **options).fit(Evaluated(), pairs(4), pairs(2))


def test_watching_a_name_of_the_tasks_own_leaves_the_log_interval(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "log_every": 100, "loggers": "jsonl", "run_dir": tmp_path}
    quiet(callbacks=[EarlyStopping("eval_loss")], **options).fit(Evaluated(), pairs(4), pairs(2))
    rows = (tmp_path / "metrics.jsonl").read_text()
    assert (rows.count('"eval_loss"'), rows.count('"loss"')) == (3, 1)


class Same(Regression):
    """Gives each value the name of the step's."""

    def metric_name(self, stage: str, loader: str | None, name: str) -> str:
        return name


class Apart(Same):
    """Its step already gives its values different names by stage."""

    def validation_step(self, batch: Any) -> Any:
        return StepOutput(None, None, {"val_loss": torch.tensor(1.0)})


def test_names_may_stay_as_the_steps_give_them() -> None:
    assert set(quiet(max_epochs=1).fit(Apart(), pairs(4), pairs(2)).metrics) == {"loss", "val_loss"}


class Logs(Callback):
    """Logs one name in one hook."""

    def __init__(self, hook: str, name: str) -> None:
        setattr(self, hook, lambda run: run.log(name, 1.0))


@pytest.mark.parametrize(
    ("task", "validation", "callbacks", "message"),
    [
        (
            Same,
            pairs(2),
            [],
            r"'loss' of validation and 'loss' of train are both named 'loss'.*Same\.metric_name return",
        ),
        (
            Same,
            {"a": pairs(2), "b": pairs(2)},
            [],
            "'loss' of validation on 'a' and 'loss' of validation on 'b'",
        ),
        (
            Regression,
            None,
            [Logs("on_log", "train/loss")],
            r"run\.log\('train/loss', .*the task's 'loss' of train",
        ),
        (
            Regression,
            pairs(2),
            [Logs("on_evaluation_end", "validation/loss")],
            r"run\.log\('validation/loss', .*the task's 'loss' of validation",
        ),
        (
            Regression,
            None,
            [Logs("on_step_end", "train/loss")],
            "a value that a hook logs and 'loss' of train are both named 'train/loss'",
        ),
    ],
)
def test_two_values_of_one_name_are_refused(
    task: type[Regression], validation: Any, callbacks: list[Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_epochs=1, callbacks=callbacks).fit(task(), pairs(4), validation)


def test_the_name_of_the_tables_count_is_refused() -> None:
    class Bare(Regression):
        def metric_name(self, stage: str, loader: str | None, name: str) -> str:
            return name

        def loss(self, outputs: Any, batch: Any) -> Any:
            return {"loss": super().loss(outputs, batch), "step": torch.ones(())}

    with pytest.raises(ConfigError, match=r"Bare.metric_name gave 'step' for 'step' of train: 'step' is"):
        quiet(max_steps=1).fit(Bare(), pairs())
    note = LambdaCallback(on_step_end=lambda run: run.log("step", 1.0))
    with pytest.raises(ConfigError, match=r"run.log\('step', ...\): 'step' is the number of updates"):
        quiet(max_steps=1, callbacks=[note]).fit(Regression(), pairs())


def test_a_name_is_a_text() -> None:
    class Nameless(Regression):
        def metric_name(self, stage: str, loader: str | None, name: str) -> Any:
            return 0

    with pytest.raises(ConfigError, match=r"Nameless\.metric_name gave 0 for 'loss' of train"):
        quiet(max_epochs=1).fit(Nameless(), pairs(4))
