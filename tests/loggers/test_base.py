"""Loggers from what a user writes, logs of a run that was cut off and resumed, and the history of a fit."""

import json
import math
import os
from types import SimpleNamespace

import pytest
from tests.integrations.tensorboard.test_tensorboard import scalars
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, EarlyStopping, LambdaCallback, LearningRateMonitor
from drivetrain.callbacks import GradientNorms
from drivetrain.core.errors import ConfigError
from drivetrain.loggers import (
    BinCounts,
    CSVLogger,
    Histogram,
    JSONLinesLogger,
    Logger,
    TensorBoardLogger,
    build_loggers,
)
from drivetrain.loggers.history import read_history

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


KINDS = {CSVLogger: "metrics.csv", JSONLinesLogger: "metrics.jsonl", TensorBoardLogger: "events.out.*"}


def test_a_new_run_sets_the_files_of_an_earlier_one_aside(tmp_path):
    for kind, name in KINDS.items():
        folder = tmp_path / kind.__name__
        for value in (1.0, 2.0, 3.0):
            logger = kind(folder)
            logger.log_metrics({"loss": value}, 1)
            logger.close()
        logger.log_metrics({"loss": 4.0}, 2)  # reopens the file
        logger.close()
        is_board = kind is TensorBoardLogger
        earlier = ["earlier-1", "earlier-2"] if is_board else [name.replace(".", f".{n}.") for n in (1, 2)]
        for each, rows in (*zip(earlier, ([(1, 1.0)], [(1, 2.0)]), strict=True), (".", [(1, 3.0), (2, 4.0)])):
            if is_board:
                assert scalars(folder / each) == {"loss": rows}
            else:
                found = read_history(folder / (name if each == "." else each))
                assert [(row["step"], row["loss"]) for row in found] == rows


def fit(run_dir, die_after=None, resume=None):
    def die(run):
        if run.progress.steps == die_after:
            raise KeyboardInterrupt

    options = {"max_epochs": 2, "log_every": 1, "checkpoint": CheckpointConfig(every="3 steps", best=0)}
    trainer = quiet(**options, callbacks=[LambdaCallback(on_step_end=die)], loggers=NAMES, run_dir=run_dir)
    trainer.fit(Regression(), pairs(), pairs(4), resume=resume)


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


@pytest.mark.parametrize("ends", ["max_steps", "early stopping"])
def test_a_finished_run_that_is_started_again_leaves_its_logs_as_they_are(tmp_path, ends):
    def logged():
        texts = [(tmp_path / name).read_bytes() for name in ("metrics.csv", "metrics.jsonl")]
        return texts, scalars(tmp_path)

    def again(dies=False):
        def die(run):
            if dies and run.progress.steps == 8:
                raise KeyboardInterrupt

        stop = EarlyStopping("validation/loss", mode="max", stop_at=-1.0)
        own = {"validate_every": 8, "callbacks": [stop]} if ends == "early stopping" else {"max_steps": 8}
        own["callbacks"] = [LearningRateMonitor(), GradientNorms(), *own.get("callbacks", ())]
        own["callbacks"].append(LambdaCallback(on_log=die))
        options = {"log_every": 3, "on_nonfinite": "skip", "checkpoint": CheckpointConfig(every="3 steps")}
        trainer = quiet(**{"max_steps": 20, **options, **own}, loggers=NAMES, run_dir=tmp_path)
        return trainer.fit(Regression(), pairs(), pairs(4), resume="auto").metrics

    with pytest.raises(KeyboardInterrupt):
        again(dies=True)
    metrics, before = again(), logged()
    rows = [row["step"] for row in map(json.loads, before[0][1].splitlines()) if "train/loss" in row]
    assert (rows, "lr" in metrics) == ([3, 6, 8], True)
    for _ in range(2):
        assert (again(), logged()) == (metrics, before)


@pytest.mark.parametrize("loggers", ["csv", ("tensorboard", "jsonl"), "instance"])
def test_history_has_every_log_point_before_a_resume_too(tmp_path, loggers):
    for steps in (4, 8):
        given = JSONLinesLogger(tmp_path / "elsewhere", "all.log") if loggers == "instance" else loggers
        options = {"max_steps": steps, "log_every": 2, "loggers": given, "checkpoint": True}
        trainer = quiet(**options, run_dir=tmp_path / "run")
        result = trainer.fit(Regression(), pairs(12), pairs(4), resume="auto")
    history = result.history
    assert [row["step"] for row in history if "train/loss" in row] == [2, 4, 6, 8]
    validated = [row["validation/loss"] for row in history if "validation/loss" in row]
    assert validated[-1] == result.metrics["validation/loss"]
    assert all(isinstance(row["step"], int) for row in history)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_a_table_gives_back_what_was_written(tmp_path, kind):
    logger = kind(tmp_path)
    logger.log_metrics({"a": 0.1, "b": math.inf}, 1)
    if kind is JSONLinesLogger:  # histograms are no numbers
        logger.log_media({"weights": Histogram(BinCounts((0.0, 1.0), (2,), 0.0, 1.0, 1.0, 1.0))}, 1)
    logger.log_metrics({"histograms": 1e-9, "class/a\nb": 2.0, "class/c\u2028d": 3.0}, 2)
    logger.close()
    with logger.path.open("a") as file:
        file.write('{"step": 3, "a"' if kind is JSONLinesLogger else "3,0.")
    assert read_history(logger.path) == [
        {"step": 1, "a": 0.1, "b": math.inf},
        {"step": 2, "histograms": 1e-9, "class/a\nb": 2.0, "class/c\u2028d": 3.0},
    ]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_log_that_is_no_file_ends_a_resumed_run_with_its_name(tmp_path):
    fit(tmp_path / "run")
    for name in ("metrics.csv", "metrics.jsonl", "config.json"):
        path, kept = tmp_path / "run" / name, tmp_path / name
        path.rename(kept)
        for make in (os.mkdir,) if name == "config.json" else (os.mkfifo, os.mkdir):
            make(path)
            with pytest.raises(ConfigError, match=rf"{name}' is a (pipe|directory)"):
                fit(tmp_path / "run", resume="auto")
            path.unlink() if path.is_fifo() else path.rmdir()
        kept.rename(path)
    for text in ("{}\n", "step,a\nx,y\n", '{"step": "x"}\n'):
        path = tmp_path / "table"
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as the history of a run"):
            read_history(path)


def test_a_fit_without_a_table_says_where_a_history_would_come_from():
    result = quiet(max_steps=2).fit(Regression(), pairs(4))
    with pytest.raises(ConfigError, match="loggers='csv'"):
        _ = result.history
