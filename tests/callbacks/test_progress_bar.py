"""The progress bar: a bar on a terminal, plain lines anywhere else, nothing on other ranks."""

import dataclasses
import io
import os
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from drivetrain.callbacks import LambdaCallback, ProgressBar
from drivetrain.callbacks import progress_bar as module

pty = pytest.importorskip("pty", reason="a terminal is made with a pty, which this system does not have")
termios = pytest.importorskip("termios", reason="this system has no terminals of this kind")


END = "<end>"


class Screen:
    """What was written to a terminal."""

    text = ""


@contextmanager
def terminal(kind="xterm", columns=120):
    """Make stderr a terminal for a while; afterwards the screen has what was written to it."""
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, columns))
    received = bytearray()

    def drain():
        # A thread, because a terminal takes only a few kB that nobody reads; up to a mark, because what was
        # not read when the other side closes may be lost.
        while not received.endswith(END.encode()):
            received.extend(os.read(main, 65536))

    reader = threading.Thread(target=drain)
    reader.start()
    screen = Screen()
    with os.fdopen(other, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", kind)
        patch.setattr(sys, "stderr", stream)
        try:
            yield screen
        finally:
            stream.write(END)
            stream.flush()
            reader.join()
            screen.text = received.decode().removesuffix(END)
    os.close(main)


@pytest.fixture
def every_draw(monkeypatch):
    """Draw at each update, so that a short run shows all."""
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_DRAWINGS", 0.0)


def test_in_a_file_there_is_one_plain_line_per_interval(drive, capsys):
    run = drive(ProgressBar(), epochs=2, updates_per_epoch=4, results=[{"loss": 0.5}] * 2).fit()
    text = capsys.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in text)
    lines = text.splitlines()
    assert [line.split(" | ")[1] for line in lines] == [f"update {number}/8" for number in (2, 4, 6, 8)]
    assert lines[0] == f"epoch 1/2 | update 2/8 | train/loss {run.history[0]['train/loss']:.4g}"
    assert lines[1].startswith("epoch 1/2 | update 4/8 | train/loss ")
    assert lines[1].endswith(" | validation/loss 0.5"), "what the same update validated stands in its line"


def test_in_a_file_what_is_between_two_lines_stands_in_the_next(drive, capsys):
    results = [{"loss": 0.5}, {"loss": 0.25}]
    drive(ProgressBar(), epochs=2, updates_per_epoch=4, log_every=3, results=results).fit()
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("epoch 1/2 | update 3/8 | train/loss ")
    assert "validation" not in first
    assert second.startswith("epoch 2/2 | update 6/8 | train/loss ")
    assert second.endswith(" | validation/loss 0.5")
    assert last.startswith("epoch 2/2 | update 8/8 | train/loss ")
    assert last.endswith(" | validation/loss 0.25")


def test_in_a_file_the_line_that_was_due_is_written_before_an_error(drive, capsys):
    def fail(run):
        raise RuntimeError("in the validation")

    failing = LambdaCallback(on_evaluation_start=fail)
    with pytest.raises(RuntimeError, match="in the validation"):
        drive(failing, ProgressBar(), log_every=4, results=[{"loss": 0.5}]).fit()
    assert capsys.readouterr().err.startswith("epoch 1/1 | update 4/4 | train/loss ")


def test_unknown_totals_are_left_out(drive, capsys):
    run = drive(ProgressBar())
    trainer = dataclasses.replace(run.trainer, max_epochs=None, max_time=0.01, log_every=1)
    trainer.fit(run.task, run.train_data)
    assert capsys.readouterr().err.startswith("epoch 1 | update 1 | train/loss ")


def test_four_metrics_of_each_stage_are_shown_or_those_that_are_named(drive, capsys):
    values = {"loss": 1.0} | {f"m{number}": 1.0 for number in range(6)}
    extra = LambdaCallback(on_log=lambda run: run.log("throughput/x", 1.0))
    drive(extra, ProgressBar(), log_every=9, results=[values]).fit()
    (line, *_) = capsys.readouterr().err.splitlines()
    assert line.count("validation/") == 4
    assert "throughput" not in line
    drive(extra, ProgressBar(metrics=["throughput/x", "missing"]), log_every=9, results=[values]).fit()
    assert capsys.readouterr().err.startswith("epoch 1/1 | update 4/4 | throughput/x 1\n")


def test_a_terminal_that_cannot_hold_a_bar_gets_plain_lines(drive):
    for kind, columns in (("dumb", 80), ("xterm", 0)):  # cannot move its cursor; has no known width
        with terminal(kind, columns) as screen:
            drive(ProgressBar(), log_every=4).fit()
        assert screen.text.startswith("epoch 1/1 | update 4/4 | train/loss")
        assert screen.text.count("\r") == screen.text.count("\r\n") == 1  # a terminal writes \r\n for \n


@pytest.mark.usefixtures("every_draw")
def test_a_terminal_gets_a_bar_that_ends_full_with_the_latest_metrics(drive):
    with terminal() as screen:
        drive(ProgressBar(), epochs=2, updates_per_epoch=4, results=[{"loss": 0.25}] * 2).fit()
    assert "validation: 100%" in screen.text
    last = screen.text.rstrip().split("\r")[-1]
    assert "epoch 2/2: 100%" in last
    assert "8/8" in last
    assert "validation/loss 0.25" in last
    assert screen.text.endswith("\r\n")


@pytest.mark.usefixtures("every_draw")
def test_a_resumed_run_goes_on_where_the_bar_stood(drive, tmp_path):
    drive(epochs=1, updates_per_epoch=4, run_dir=tmp_path).fit()
    run = drive(ProgressBar(), epochs=2, updates_per_epoch=4, run_dir=tmp_path)
    with terminal() as screen:
        run.fit(resume="auto")
    first = next(part for part in screen.text.split("\r") if "epoch" in part)
    assert "epoch 2/2:  50%" in first
    assert "4/8" in first


@pytest.mark.usefixtures("every_draw")
def test_evaluation_and_prediction_have_bars_that_disappear(drive):
    run = drive(ProgressBar())
    with terminal() as screen:
        run.trainer.test(run.task, {"clean": run.train_data, "noisy": run.train_data[:3]})
    for part in ("test clean: 100%", "4/4", "test noisy: 100%", "3/3"):
        assert part in screen.text
    assert screen.text.rsplit("\r", 2)[-2].strip() == ""  # the line was wiped
    assert "\n" not in screen.text
    with terminal() as screen:
        run.trainer.predict(run.task, run.train_data)
    assert "predict: 100%" in screen.text
    assert "\n" not in screen.text


def test_a_bar_is_drawn_only_now_and_then_and_starts_no_thread(drive, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.01))
    before, during = set(threading.enumerate()), set()
    watch = LambdaCallback(on_step_end=lambda run: during.update(threading.enumerate()))
    with terminal() as screen:
        drive(ProgressBar(), watch, updates_per_epoch=200, log_every=500).fit()
    assert 2 <= screen.text.count("/200") <= 100
    assert "200/200" in screen.text.split("\r")[-2]
    started = {each.name for each in during - before if "drain" not in each.name}
    assert started <= {"drivetrain-signals", "drivetrain-watchdog"}  # of the run itself


@pytest.mark.usefixtures("every_draw")
def test_an_exception_leaves_the_terminal_in_order(drive):
    def fail(run):
        raise RuntimeError("lost")

    for hook in ("on_step_end", "on_evaluation_step_end"):
        run = drive(ProgressBar(), LambdaCallback(**{hook: fail}), results=[{"loss": 0.5}])
        with terminal() as screen, pytest.raises(RuntimeError, match="lost"):
            run.fit()
        assert not tqdm._instances
        assert screen.text.endswith("\r\n")


@pytest.mark.usefixtures("every_draw")
def test_other_ranks_show_nothing(drive):
    run = drive(ProgressBar(), is_main=False, results=[{"loss": 0.5}])
    with terminal() as screen:
        run.fit()
        run.trainer.test(run.task, run.train_data)
    assert screen.text == ""


def test_a_second_fit_has_a_second_bar(drive, capsys):
    bar = ProgressBar()
    for _ in range(2):
        drive(bar, log_every=4).fit()
    assert capsys.readouterr().err.count("update 4/4") == 2


def test_without_a_stderr_nothing_breaks(drive, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run = drive(ProgressBar()).fit()
    assert run.progress.updates == 4
