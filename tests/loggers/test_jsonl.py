"""The JSON-lines logger: strict lines that a kill and a resume leave whole."""

import json
import math
from pathlib import Path

import pytest

from drivetrain.loggers import JSONLinesLogger


def read(directory: Path) -> list[dict]:
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_one_strict_object_per_log_point_with_exact_numbers(tmp_path):
    value = 0.1 + 0.2
    logger = JSONLinesLogger(tmp_path)
    logger.log_metrics({"train/loss": value}, step=1)
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, step=2)
    assert read(tmp_path) == [
        {"step": 1, "train/loss": value},
        {"step": 2, "a": "NaN", "b": "Infinity", "c": "-Infinity"},
    ]
    assert math.isnan(float(read(tmp_path)[1]["a"]))
    logger.close()


def test_nothing_is_made_until_something_is_logged(tmp_path):
    logger = JSONLinesLogger(tmp_path / "run")
    logger.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo'], ids=["whole", "a torn line"])
def test_after_a_resume_the_file_is_that_of_the_uninterrupted_run(tmp_path, tail):
    first = JSONLinesLogger(tmp_path)
    first.log_metrics({"loss": 1.0}, 1)
    state = json.loads(json.dumps(first.state_dict()))
    first.log_metrics({"loss": 0.9}, 2)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(tail)
    resumed = JSONLinesLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 0.9}, 2)
    resumed.close()
    assert read(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.9}]


def test_a_line_torn_before_the_checkpoint_does_not_swallow_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"', encoding="utf-8")
    logger = JSONLinesLogger(tmp_path)
    logger.load_state_dict({"lines": 2})
    logger.log_metrics({"loss": 0.5}, 3)
    logger.close()
    assert read(tmp_path) == [{"step": 1}, {"step": 3, "loss": 0.5}]


def test_resuming_without_the_file_goes_on(tmp_path):
    logger = JSONLinesLogger(tmp_path)
    logger.load_state_dict({"lines": 2})
    logger.log_metrics({"loss": 0.5}, 3)
    assert logger.state_dict() == {"lines": 1}
    logger.close()
    assert read(tmp_path) == [{"step": 3, "loss": 0.5}]


def test_a_new_run_sets_the_file_of_an_earlier_one_aside(tmp_path):
    for value in (1.0, 2.0):
        logger = JSONLinesLogger(tmp_path)
        logger.log_metrics({"loss": value}, 1)
        logger.close()
    assert read(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text(encoding="utf-8")) == {"step": 1, "loss": 1.0}


def test_close_twice_then_logging_goes_on_in_the_same_file(tmp_path):
    logger = JSONLinesLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.close()
    logger.close()
    logger.log_metrics({"loss": 0.5}, 2)
    logger.close()
    assert [row["loss"] for row in read(tmp_path)] == [1.0, 0.5]


def test_the_configuration_stands_beside_the_lines(tmp_path):
    logger = JSONLinesLogger(tmp_path)
    logger.log_config({"strategy": "single"})
    logger.close()
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"strategy": "single"}
