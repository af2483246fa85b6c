"""Loggers from what a user writes."""

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger, build_loggers


class MyLogger:
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def log_config(self, config):
        pass

    def close(self):
        pass


def test_names_become_loggers_that_write_in_the_runs_directory(tmp_path):
    loggers = build_loggers(("tensorboard", "csv", "jsonl"), tmp_path / "run")
    assert [type(each) for each in loggers] == [TensorBoardLogger, CSVLogger, JSONLinesLogger]
    assert not (tmp_path / "run").exists()
    for logger in loggers:
        assert isinstance(logger, Logger)
        logger.log_metrics({"loss": 1.0}, 1)
        logger.close()
    names = sorted(path.name.partition(".tfevents")[0] for path in (tmp_path / "run").iterdir())
    assert names == ["events.out", "metrics.csv", "metrics.jsonl"]


def test_a_single_name_a_logger_of_ones_own_and_none(tmp_path):
    own = MyLogger()
    assert [type(each) for each in build_loggers("csv", tmp_path)] == [CSVLogger]
    assert build_loggers(own, None) == [own]
    assert build_loggers(["csv", own], tmp_path)[1] is own
    assert build_loggers((), None) == []


def test_a_wrong_name_is_told_the_nearest(tmp_path):
    with pytest.raises(
        ConfigError, match=r"unknown logger 'tensorbord'.*Did you mean 'tensorboard'.*'jsonl'"
    ):
        build_loggers("tensorbord", tmp_path)


@pytest.mark.parametrize("wrong", [3, None, CSVLogger, ["csv", object()]])
def test_what_is_no_logger_is_refused_with_what_is_allowed(tmp_path, wrong):
    with pytest.raises(ConfigError, match=r"is no logger.*'csv'.*log_metrics"):
        build_loggers(wrong, tmp_path)


def test_the_same_name_twice_would_write_one_file_twice_and_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'csv' is given twice"):
        build_loggers(("csv", "csv"), tmp_path)


def test_a_name_needs_a_directory():
    with pytest.raises(ConfigError, match="'csv' needs a directory; give the Trainer a run_dir"):
        build_loggers("csv", None)
