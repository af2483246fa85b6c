"""The CSV logger: a table that reads back exactly and is the same after a kill and a resume."""

import csv
import io
import json
import math
from pathlib import Path

from drivetrain.loggers import CSVLogger
from drivetrain.loggers.history import read_history


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


def text_of(directory: Path, name: str = "metrics.csv") -> str:
    return (directory / name).read_text(encoding="utf-8")


def log(directory: Path, *rows: tuple[int, dict[str, float]], state: object = None) -> dict[str, object]:
    logger = CSVLogger(directory)
    if state is not None:
        logger.load_state_dict(state)
    for step, metrics in rows:
        logger.log_metrics(metrics, step)
    logger.close()
    return json.loads(json.dumps(logger.state_dict()))


def test_values_read_back_with_the_same_bits_as_soon_as_the_call_returns(tmp_path):
    logger = CSVLogger(tmp_path / "run")
    logger.close()
    assert not (tmp_path / "run").exists()  # nothing is made until something is logged
    logger.log_metrics({"train/loss": 0.1 + 0.2, "train/odd": math.nan, "train/large": math.inf}, step=7)
    (row,) = read(tmp_path / "run" / "metrics.csv")
    assert (row["step"], float(row["train/loss"]), row["train/large"]) == ("7", 0.1 + 0.2, "inf")
    assert math.isnan(float(row["train/odd"]))
    logger.close()
    logger.close()
    logger.log_metrics({"train/loss": 0.5}, 8)  # goes on in the same file
    assert [row["step"] for row in read(tmp_path / "run" / "metrics.csv")] == ["7", "8"]
    logger.close()


def test_a_metric_that_appears_later_gets_a_column_and_keeps_the_rows_before(tmp_path):
    log(tmp_path, (1, {"train/loss": 1.0}), (2, {"validation/loss": 2.0}), (3, {'1, "top"': 0.5}))
    lines = ['step,train/loss,validation/loss,"1, ""top"""', "1,1.0,,", "2,,2.0,", "3,,,0.5"]
    assert text_of(tmp_path).splitlines() == lines
    assert read(tmp_path / "metrics.csv")[2]['1, "top"'] == "0.5"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_values_of_one_step_are_one_row_also_after_a_resume(tmp_path):
    state = log(tmp_path, (1, {"train/loss": 1.0}), (2, {"train/loss": 0.5, "lr": 0.1}))
    log(tmp_path, (2, {"validation/loss": 0.75, "lr": 0.2}), (3, {"train/loss": 0.25}), state=state)
    assert text_of(tmp_path) == "step,train/loss,lr,validation/loss\n1,1.0,,\n2,0.5,0.2,0.75\n3,0.25,,\n"
    assert [sorted(row.items()) for row in read_history(tmp_path / "metrics.csv")][1] == [
        *(("lr", 0.2), ("step", 2), ("train/loss", 0.5), ("validation/loss", 0.75))
    ]
    log(tmp_path, state=state)  # what was added to the row since is cut
    assert text_of(tmp_path) == "step,train/loss,lr\n1,1.0,\n2,0.5,0.1\n"
    logger = CSVLogger(tmp_path)
    logger.load_state_dict(state)
    with (tmp_path / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("7,0.125,\n")  # another program's row is kept
    logger.log_metrics({"lr": 0.3}, 2)
    logger.close()
    assert text_of(tmp_path).splitlines()[2:] == ["2,0.5,0.1", "7,0.125,", "2,,0.3"]


def test_a_resume_goes_on_after_what_is_left_of_the_file(tmp_path):
    state = {"columns": ["loss"], "rows": 3}
    row = "1,1.0\n"
    cases = {None: "", "step,lo": "", f"step,loss\n{row}2,0.": row}
    for number, (left, kept) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        if left is not None:
            folder.mkdir()
            (folder / "metrics.csv").write_text(left, encoding="utf-8")
        after = log(folder, (4, {"loss": 0.5}), state=state)
        assert text_of(folder) == f"step,loss\n{kept}4,0.5\n", left
        assert after == {"columns": ["loss"], "rows": 1 + bool(kept), "last": "4,0.5\n"}
    # A table of other columns is set aside and not mixed in.
    (folder / "metrics.csv").write_text("step,other\n1,1.0\n", encoding="utf-8")
    log(folder, (2, {"loss": 0.5}), state=state)
    assert text_of(folder) == "step,loss\n2,0.5\n"
    assert text_of(folder, "metrics.1.csv") == "step,other\n1,1.0\n"
