"""Loggers from what a user writes; and logs of a run that was cut off and resumed."""

from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.core.errors import ConfigError
from drivetrain.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger, build_loggers

NAMES = ("tensorboard", "csv", "jsonl")


def test_names_become_loggers_that_write_in_the_runs_directory(tmp_path):
    loggers = build_loggers(NAMES, tmp_path / "run")
    assert [type(each) for each in loggers] == [TensorBoardLogger, CSVLogger, JSONLinesLogger]
    assert not (tmp_path / "run").exists()
    for logger in loggers:
        assert isinstance(logger, Logger)
        logger.log_metrics({"loss": 1.0}, 1)
        logger.close()
    names = sorted(path.name.partition(".tfevents")[0] for path in (tmp_path / "run").iterdir())
    assert names == ["events.out", "metrics.csv", "metrics.jsonl"]
    own = SimpleNamespace(log_metrics=print, log_config=print, close=print)
    assert build_loggers(own, None) == [own]
    assert build_loggers(["csv", own], tmp_path)[1] is own
    assert build_loggers((), None) == []


def test_what_is_no_logger_is_refused_with_what_is_allowed(tmp_path):
    table = {
        "misspelt": (lambda: build_loggers("tensorbord", tmp_path), "did you mean 'tensorboard'", "'jsonl'"),
        "twice": (lambda: build_loggers(("csv", "csv"), tmp_path), "'csv' is given twice"),
        "no directory": (lambda: build_loggers("csv", None), "'csv' needs a directory", "run_dir"),
    }
    for wrong in (CSVLogger, ["csv", object()]):
        call = lambda wrong=wrong: build_loggers(wrong, tmp_path)  # noqa: E731
        table[str(wrong)] = (call, "is no logger", "'csv'", "log_metrics")
    assert_refused(ConfigError, table)


def fit(run_dir, die_after=None, resume=None):
    def die(run):
        if run.progress.updates == die_after:
            raise KeyboardInterrupt

    options = {"max_epochs": 2, "log_every": 1, "checkpoint": CheckpointConfig(every="3 steps", best=0)}
    trainer = quiet(**options, callbacks=[LambdaCallback(on_step_end=die)], loggers=NAMES, run_dir=run_dir)
    trainer.fit(Regression(), pairs(), pairs(4), resume=resume)


def scalars(directory):
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in tags}


def test_logs_of_a_resumed_run_equal_those_of_an_uninterrupted_one(tmp_path):
    fit(tmp_path / "whole")
    assert len(scalars(tmp_path / "whole")["train/loss"]) == 10
    for die_after in (2, 5, 9):  # before a checkpoint, before a validation, late
        resumed = tmp_path / str(die_after)
        with pytest.raises(KeyboardInterrupt):
            fit(resumed, die_after=die_after)
        fit(resumed, resume="auto")
        for name in ("metrics.csv", "metrics.jsonl"):
            assert (resumed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert scalars(resumed) == scalars(tmp_path / "whole")
