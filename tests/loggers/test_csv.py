"""The CSV logger: a table that reads back exactly and is the same after a kill and a resume."""

import csv
import json
import math
import os
from pathlib import Path

import pytest

from drivetrain.loggers import CSVLogger


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_values_read_back_with_the_same_bits(tmp_path):
    value = 0.1 + 0.2
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"train/loss": value, "train/odd": math.nan, "train/large": math.inf}, step=7)
    (row,) = read(tmp_path / "metrics.csv")
    assert row["step"] == "7"
    assert float(row["train/loss"]) == value
    assert math.isnan(float(row["train/odd"]))
    assert float(row["train/large"]) == math.inf
    logger.close()


def test_nothing_is_made_until_something_is_logged(tmp_path):
    directory = tmp_path / "run"
    logger = CSVLogger(directory)
    logger.close()
    assert not directory.exists()


def test_a_metric_that_appears_later_gets_a_column_and_keeps_the_rows_before(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.log_metrics({"validation/loss": 2.0}, step=1)
    logger.log_metrics({"train/loss": 0.5}, step=2)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines() == [
        "step,train/loss,validation/loss",
        "1,1.0,",
        "1,,2.0",
        "2,0.5,",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_name_with_a_comma_stays_one_column(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({'top 1, "strict"': 1.0}, step=1)
    logger.log_metrics({"other": 2.0}, step=2)
    logger.close()
    assert read(tmp_path / "metrics.csv")[0]['top 1, "strict"'] == "1.0"


def test_each_row_is_on_disk_when_the_call_returns(tmp_path):
    logger = CSVLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
        assert len(read(tmp_path / "metrics.csv")) == step + 1
    logger.close()


def interrupted_and_resumed(directory: Path, tail: str = "") -> bytes:
    """Three rows, the state after the second, a new column in the third; then on from the state."""
    first = CSVLogger(directory)
    first.log_metrics({"loss": 1.0}, 1)
    first.log_metrics({"loss": 0.9}, 2)
    state = json.loads(json.dumps(first.state_dict()))
    first.log_metrics({"loss": 0.8, "surprise": 1.0}, 3)
    first.close()
    with (directory / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write(tail)
    resumed = CSVLogger(directory)
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 0.8}, 3)
    resumed.log_metrics({"loss": 0.7, "later": 3.0}, 4)
    resumed.close()
    return (directory / "metrics.csv").read_bytes()


@pytest.mark.parametrize("tail", ["", "4,0.", '4,"'], ids=["whole", "a torn row", "a torn quote"])
def test_after_a_resume_the_file_is_that_of_the_uninterrupted_run(tmp_path, tail):
    plain = CSVLogger(tmp_path / "plain")
    for step, row in enumerate([{"loss": 1.0}, {"loss": 0.9}, {"loss": 0.8}, {"loss": 0.7, "later": 3.0}], 1):
        plain.log_metrics(row, step)
    plain.close()
    resumed = interrupted_and_resumed(tmp_path / "resumed", tail)
    assert resumed == (tmp_path / "plain" / "metrics.csv").read_bytes()


def test_resuming_without_the_file_begins_a_new_one_with_the_known_columns(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.load_state_dict({"columns": ["a", "b"], "rows": 5})
    logger.log_metrics({"b": 1.0}, 6)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "step,a,b\n6,,1.0\n"


@pytest.mark.parametrize("content", ["", "step,lo"], ids=["empty", "a torn header"])
def test_resuming_with_a_file_killed_before_its_first_row_starts_it_again(tmp_path, content):
    (tmp_path / "metrics.csv").write_text(content, encoding="utf-8")
    logger = CSVLogger(tmp_path)
    logger.load_state_dict({"columns": ["loss"], "rows": 1})
    logger.log_metrics({"loss": 1.0}, 2)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "step,loss\n2,1.0\n"


@pytest.mark.parametrize("tail", ["", "2,0."], ids=["whole", "a torn row"])
def test_resuming_with_a_shorter_file_goes_on_after_its_last_complete_row(tmp_path, tail):
    (tmp_path / "metrics.csv").write_text(f"step,loss\n1,1.0\n{tail}", encoding="utf-8")
    logger = CSVLogger(tmp_path)
    logger.load_state_dict({"columns": ["loss"], "rows": 3})
    logger.log_metrics({"loss": 0.5}, 4)
    assert logger.state_dict() == {"columns": ["loss"], "rows": 2}
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "step,loss\n1,1.0\n4,0.5\n"


def test_a_new_run_sets_the_file_of_an_earlier_one_aside(tmp_path):
    for value in (1.0, 2.0, 3.0):
        logger = CSVLogger(tmp_path)
        logger.log_metrics({"loss": value}, 1)
        logger.close()
    contents = {path.name: read(path)[0]["loss"] for path in tmp_path.iterdir()}
    assert contents == {"metrics.1.csv": "1.0", "metrics.2.csv": "2.0", "metrics.csv": "3.0"}


def test_a_table_of_other_columns_is_set_aside_and_not_mixed_in(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,other\n1,1.0\n", encoding="utf-8")
    logger = CSVLogger(tmp_path)
    logger.load_state_dict({"columns": ["loss"], "rows": 1})
    logger.log_metrics({"loss": 0.5}, 2)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "step,loss\n2,0.5\n"
    assert (tmp_path / "metrics.1.csv").read_text(encoding="utf-8") == "step,other\n1,1.0\n"


def test_close_twice_then_logging_goes_on_in_the_same_file(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.close()
    logger.close()
    logger.log_metrics({"loss": 0.5}, 2)
    logger.close()
    assert [row["loss"] for row in read(tmp_path / "metrics.csv")] == ["1.0", "0.5"]


def test_the_configuration_is_strict_json_beside_the_table(tmp_path):
    logger = CSVLogger(tmp_path / "run")
    config = {
        "lr": 1e-3,
        "limit": math.inf,
        "dir": Path("a") / "b",
        "nested": {"betas": (0.9, 0.95)},
        "no": None,
    }
    logger.log_config(config)
    logger.close()
    text = (tmp_path / "run" / "config.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {
        "lr": 1e-3,
        "limit": "Infinity",
        "dir": os.path.join("a", "b"),
        "nested": {"betas": [0.9, 0.95]},
        "no": None,
    }
