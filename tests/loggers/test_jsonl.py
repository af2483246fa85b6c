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
    logger = JSONLinesLogger(tmp_path / "run")
    logger.close()
    assert not (tmp_path / "run").exists()  # nothing is made until something is logged
    logger.log_metrics({"train/loss": 0.1 + 0.2}, step=1)
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, step=2)
    found = [{"step": 1, "train/loss": 0.1 + 0.2}, {"step": 2, "a": "NaN", "b": "Infinity", "c": "-Infinity"}]
    assert read(tmp_path / "run") == found
    logger.close()
    logger.close()
    logger.log_metrics({"loss": 0.5}, 3)  # goes on in the same file
    assert read(tmp_path / "run") == [*found, {"step": 3, "loss": 0.5}]
    logger.log_config({"limit": math.inf, "dir": Path("a"), "nested": {"betas": (0.9, 0.95)}, "no": None})
    logger.close()
    config = json.loads((tmp_path / "run" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config == {"limit": "Infinity", "dir": "a", "nested": {"betas": [0.9, 0.95]}, "no": None}


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo'], ids=["whole", "a torn line"])
def test_after_a_resume_the_file_is_that_of_the_uninterrupted_run(tmp_path, tail):
    first, resumed = JSONLinesLogger(tmp_path), JSONLinesLogger(tmp_path)
    first.log_metrics({"loss": 1.0}, 1)
    state = json.loads(json.dumps(first.state_dict()))
    first.log_metrics({"loss": 0.8}, 2)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(tail)
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 0.9}, 2)
    resumed.close()
    assert read(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.9}]


def test_a_resume_goes_on_after_what_is_left_of_the_file(tmp_path):
    for number, content in enumerate((None, '{"step": 1}\n{"step"')):
        folder = tmp_path / str(number)
        folder.mkdir()
        if content:  # a line that was torn before the checkpoint does not swallow the next
            (folder / "metrics.jsonl").write_text(content, encoding="utf-8")
        logger = JSONLinesLogger(folder)
        logger.load_state_dict({"lines": 2})
        logger.log_metrics({"loss": 0.5}, 3)
        assert logger.state_dict() == {"lines": 1 + number}
        logger.close()
        assert read(folder) == [{"step": 1}] * number + [{"step": 3, "loss": 0.5}]
