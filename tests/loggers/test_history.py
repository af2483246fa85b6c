"""The history of a fit is read from its table."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ConfigError
from drivetrain.loggers import CSVLogger, JSONLinesLogger
from drivetrain.loggers.history import read_history


@pytest.mark.parametrize("loggers", ["csv", ("tensorboard", "jsonl"), "instance"])
def test_history_has_every_log_point_before_a_resume_too(tmp_path: Path, loggers: Any) -> None:
    for steps in (4, 8):
        given = JSONLinesLogger(tmp_path / "elsewhere", "all.log") if loggers == "instance" else loggers
        options: Any = {"max_steps": steps, "log_every": 2, "loggers": given, "checkpoint": True}
        trainer = quiet(**options, run_dir=tmp_path / "run")
        result = trainer.fit(Regression(), pairs(12), pairs(4), resume="auto")
    history = result.history
    assert [row["step"] for row in history if "train/loss" in row] == [2, 4, 6, 8]
    validated = [row["validation/loss"] for row in history if "validation/loss" in row]
    assert validated[-1] == result.metrics["validation/loss"]
    assert all(isinstance(row["step"], int) for row in history)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_a_table_gives_back_what_was_written(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path)
    logger.log_metrics({"a": 0.1, "b": math.inf}, 1)
    logger.log_metrics({"histograms": 1e-9, "class/a\nb": 2.0, "class/c\u2028d": 3.0}, 2)
    logger.close()
    with logger.path.open("a") as file:
        file.write('{"step": 3, "a"' if kind is JSONLinesLogger else "3,0.")
    assert read_history(logger.path) == [
        {"step": 1, "a": 0.1, "b": math.inf},
        {"step": 2, "histograms": 1e-9, "class/a\nb": 2.0, "class/c\u2028d": 3.0},
    ]


def test_a_fit_without_a_table_says_where_a_history_would_come_from() -> None:
    result = quiet(max_steps=2).fit(Regression(), pairs(4))
    with pytest.raises(ConfigError, match="loggers='csv'"):
        _ = result.history
