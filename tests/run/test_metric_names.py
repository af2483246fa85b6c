"""The names of a run's values: as the task names them, in everything that reads or writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, EarlyStopping, LambdaCallback, OptimizerConfig, ProgressBar

VALIDATION_LOSSES = [3.0, 2.0, 1.0, 2.0, 3.0, 4.0]


class Evaluated(Regression):
    """Names its values as transformers' Trainer does; its validation losses are given."""

    def __init__(self) -> None:
        options = {"metric": "eval_loss", "patience": 0, "factor": 0.5}
        super().__init__(
            OptimizerConfig("sgd", lr=0.1, schedule="reduce_on_plateau", schedule_options=options)
        )
        self.evaluations = -1

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


def test_the_default_policy_ranks_by_the_loss_and_a_resumed_fit_knows_it_under_its_name(
    tmp_path: Path,
) -> None:
    evaluations: list[int] = []
    count = LambdaCallback(on_evaluation_end=lambda run: evaluations.append(run.progress.updates))
    options: dict[str, Any] = {"callbacks": [count], "checkpoint": True, "run_dir": tmp_path}
    result = quiet(max_epochs=3, **options).fit(Evaluated(), pairs(4), pairs(2))
    assert str(result.best_checkpoint).endswith("6")
    quiet(max_steps=7, **options).fit(Evaluated(), pairs(4), pairs(2), resume="auto")
    assert evaluations == [2, 4, 6], "it has validated already"
