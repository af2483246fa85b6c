"""The progress bar: a bar on a terminal, plain lines anywhere else, nothing on other ranks."""

import ast
import dataclasses
import json
import os
import re
import sys
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from tests.test_notebooks import ROOT, executed
from tqdm import tqdm

from drivetrain.callbacks import LambdaCallback, ProgressBar
from drivetrain.callbacks.progress import progress_bar as module

pty = pytest.importorskip("pty", reason="a terminal is made with a pty, which this system does not have")
termios = pytest.importorskip("termios", reason="this system has no terminals of this kind")

END = "<end>"


@contextmanager
def terminal(seconds_between_drawings=0.0, columns=120, **variables):
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
    screen = SimpleNamespace(text="")
    with os.fdopen(other, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.delenv("CI", raising=False)
        for name, value in {"TERM": "xterm", **variables}.items():
            patch.setenv(name, value)
        patch.setattr(module, "_SECONDS_BETWEEN_DRAWINGS", seconds_between_drawings)
        patch.setattr(sys, "stderr", stream)
        try:
            yield screen
        finally:
            stream.write(END)
            stream.flush()
            reader.join()
            screen.text = received.decode().removesuffix(END)
    os.close(main)


def lines_of(capsys):  # the lines in a file, without control characters
    text = capsys.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in text)
    return text.splitlines()


def test_a_file_has_one_plain_line_per_interval(drive, capsys):
    options = {"epochs": 2, "steps_per_epoch": 4}
    run = drive(ProgressBar(), results=[{"loss": 0.5}] * 2, **options).fit()
    lines = lines_of(capsys)
    assert [line.split(" | ")[1] for line in lines] == [f"step {number}/8" for number in (2, 4, 6, 8)]
    assert lines[0] == f"epoch 1/2 | step 2/8 | train/loss {run.history[0]['train/loss']:.4g}"
    assert lines[1].endswith(" | validation/loss 0.5"), "what the same step validated stands in its line"
    drive(ProgressBar(), log_every=3, results=[{"loss": 0.5}, {"loss": 0.25}], **options).fit()
    first, second, last = lines_of(capsys)  # what is between two lines stands in the next
    assert first.startswith("epoch 1/2 | step 3/8 | train/loss ")
    assert "validation" not in first
    assert second.endswith(" | validation/loss 0.5")
    assert last.startswith("epoch 2/2 | step 8/8 | train/loss ")
    assert last.endswith(" | validation/loss 0.25")
    run = drive(ProgressBar(), log_every=4).fit()
    assert len(lines_of(capsys)) == 1
    trainer = dataclasses.replace(run.trainer, max_epochs=None, max_time=0.01, log_every=1)
    trainer.fit(run.task, run.train_data)  # unknown totals are left out
    assert lines_of(capsys)[0].startswith("epoch 1 | step 1 | train/loss ")


def test_metrics_are_those_that_are_named_or_four_of_each_stage(drive, capsys):
    values = {"loss": 1.0} | {f"m{number}": 1.0 for number in range(6)}
    extra = LambdaCallback(on_log=lambda run: run.log("throughput/x", 1.0))
    drive(extra, ProgressBar(), log_every=9, results=[values]).fit()
    (line, *_) = lines_of(capsys)
    assert line.count("validation/") == 4
    assert "throughput" not in line
    drive(extra, ProgressBar(metrics=["throughput/x", "missing"]), log_every=9, results=[values]).fit()
    assert lines_of(capsys)[0] == "epoch 1/1 | step 4/4 | throughput/x 1"


def test_a_terminal_gets_a_bar_that_ends_full_and_goes_on_after_a_resume(drive, tmp_path):
    options = {"steps_per_epoch": 4, "run_dir": tmp_path}
    with terminal() as screen:
        drive(ProgressBar(), results=[{"loss": 0.25}], **options).fit()
    assert "validation: 100%" in screen.text
    last = screen.text.rstrip().split("\r")[-1]
    assert all(part in last for part in ("epoch 1/1: 100%", "4/4", "validation/loss 0.25"))
    assert screen.text.endswith("\r\n")
    run = drive(ProgressBar(), epochs=2, results=[{"loss": 0.25}], **options)
    with terminal() as screen:
        run.fit(resume="auto")
    first = next(part for part in screen.text.split("\r") if "epoch" in part)
    assert "epoch 2/2:  50%" in first
    assert "4/8" in first


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"CI": "true"}, {"NO_COLOR": "1"}], ids=str)
@pytest.mark.parametrize("style", ["tqdm", "rich"])
def test_a_dumb_terminal_and_a_log_get_plain_lines_and_no_colour_is_forced(drive, style, variables):
    pytest.importorskip(style)
    with terminal(**variables) as screen:
        drive(ProgressBar(style=style), results=[{"loss": 0.25}], steps_per_epoch=4).fit()
    assert "validation/loss 0.25" in screen.text
    assert not re.search(r"\x1b\[[\d;]+m", screen.text)  # a colour
    assert ("\x1b" in screen.text or "\r" in screen.text.replace("\r\n", "")) is ("NO_COLOR" in variables)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_keeps_a_line_per_epoch_and_cuts_no_number(drive, columns):
    results = [{"loss": 0.12345, "accuracy": 0.98768}] * 2
    with terminal(1e9, columns) as screen:  # no step but the first draws the bar
        drive(ProgressBar(), epochs=2, results=results).fit()
    text = screen.text.replace("\r\n    ", " | ")  # a long line goes on in the next, indented
    for number in (1, 2):
        line = text.split(f"epoch {number}/2 | step {4 * number}/8 | train/loss ")[1]
        assert line.split("\r")[0].endswith(" | validation/loss 0.1235 | validation/accuracy 0.9877")
        below = next(part for part in line.split("\r")[1:] if "%" in part)
        assert f"epoch {number}/2: {50 * number:3}%" in below
    bar = screen.text.rstrip().split("\r")[-1]
    assert len(bar) <= columns
    assert "█" * 5 in bar
    assert ("loss 0.1235" in bar) == (columns > 60)
    assert "accuracy" not in bar or "accuracy 0.9877]" in bar
    assert "val loss 0.1235" in bar or columns != 80


def raising(error):
    def hook(run):
        raise error

    return hook


@pytest.fixture
def outputs(capsys, monkeypatch):  # what a notebook's cell shows, one after the other
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_DRAWINGS", 0.0)
    # IPython prints the data of an output where it has no kernel.
    yield lambda: [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("hook", "made", "ending"),
    [
        (lambda run: None, 8, ""),
        (lambda run: run.stop("<enough>"), 1, "&lt;enough&gt;"),
        (raising(RuntimeError("lost")), 1, "failed: RuntimeError"),
        (raising(KeyboardInterrupt()), 1, "interrupted"),
    ],
    ids=["whole", "stopped", "failed", "interrupted"],
)
def test_a_notebook_has_one_output_that_ends_with_values_or_the_reason(drive, outputs, hook, made, ending):
    results = [{"loss": 0.5, "<b>": 0.25}] * 2
    with suppress(RuntimeError, KeyboardInterrupt):
        drive(ProgressBar(), LambdaCallback(on_step_end=hook), epochs=2, results=results).fit()
    found = outputs()
    shown = [each["text/html"] for each in found]
    validates = ending in ("", "&lt;enough&gt;")
    assert any("<span>validation</span>" in each for each in shown) == validates
    assert shown[-1].count("<progress") == 1, "the evaluation's bar is gone"
    assert f'<progress value="{made}" max="8"' in shown[-1]
    assert ending in shown[-1]
    assert ("#d93025" in shown[-1]) != validates
    assert not any("<b>" in each.replace(f"<b>{ending}</b>", "") for each in shown)
    if not ending:
        assert shown[-1].count("<tr>") == 3, "a head, and a row for each epoch"
        assert ">validation/<wbr>&lt;b&gt;</th>" in shown[-1]
        line, *_ = found[-1]["text/plain"].splitlines()
        assert re.fullmatch("epoch 1/2 . step 4/8 . train/loss .* . validation/loss 0.5 . .*/<b> 0.25", line)


def test_a_bar_is_drawn_only_now_and_then_and_starts_no_thread(drive, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.01))
    before, during = set(threading.enumerate()), set()
    watch = LambdaCallback(on_step_end=lambda run: during.update(threading.enumerate()))
    with terminal(module._SECONDS_BETWEEN_DRAWINGS) as screen:
        drive(ProgressBar(), watch, steps_per_epoch=200, log_every=500).fit()
    assert 2 <= screen.text.count("/200") <= 100
    assert "200/200" in screen.text.split("\r")[-2]
    started = {each.name for each in during - before if "drain" not in each.name}
    assert started <= {"drivetrain-signals", "drivetrain-watchdog"}  # of the run itself


@pytest.mark.parametrize("style", ["tqdm", "rich"])
def test_an_exception_leaves_the_terminal_in_order(drive, style):
    def fail(run):
        raise RuntimeError("lost")

    for hook in ("on_step_end", "on_evaluation_step_end"):
        run = drive(ProgressBar(style=style), LambdaCallback(**{hook: fail}), results=[{"loss": 0.5}])
        with terminal() as screen, pytest.raises(RuntimeError, match="lost"):
            run.fit()
        assert not tqdm._instances
        assert screen.text.removesuffix("\x1b[?25h").endswith("\r\n")  # rich shows the cursor again


@pytest.mark.parametrize("columns", [60, 140])
def test_a_bar_of_rich_has_the_same_lines_and_values(drive, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))  # it asks the process's own terminal
    output, threads = sys.stdout, set(threading.enumerate())
    results = [{"loss": 0.12345, "accuracy": 0.98768}] * 2
    with terminal(columns=columns) as screen:
        drive(ProgressBar(style="rich"), epochs=2, results=results).fit()
    assert sys.stdout is output
    assert set(threading.enumerate()) == threads
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.text).replace("\r\n    ", " | ")
    for number in (1, 2):
        line = text.split(f"epoch {number}/2 | step {4 * number}/8 | train/loss ")[1]
        assert line.split("\r")[0].endswith(" | validation/loss 0.1235 | validation/accuracy 0.9877")
    last = text.rstrip().split("\r")[-1]
    assert last.startswith("epoch 2/2 ")
    assert " 8/8 " in last
    assert ("validation/accuracy 0.9877" in last) == (columns == 140)
    assert "0.9" not in last or "0.9877" in last
    assert "validation" in text


@pytest.mark.landing
def test_a_notebook_has_a_table_of_the_last_values_and_the_result_as_a_table(tmp_path):
    source = f"""
import dataclasses
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.tasks import Regression, pairs, quiet
trainer = quiet(max_epochs=2, log_every=2, progress_bar=True, loggers="csv", run_dir="run")
result = trainer.fit(Regression(), pairs(), pairs(4))
result
"""
    ranks = """
two = dataclasses.replace(trainer, devices=2, strategy="ddp", run_dir="two")
two.fit(Regression(), pairs(), pairs(4)).stop_reason
"""
    sources = [source, "result.plot()", ranks]
    empty = {"cell_type": "code", "outputs": [], "metadata": {}, "execution_count": None}
    cells = [empty | {"source": each} for each in sources]
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    fit, plot, ranks = (cell["outputs"] for cell in executed(path, tmp_path)["cells"])
    bar, result = ("".join(each["data"]["text/html"]) for each in fit if "data" in each)
    assert "<span>epoch 2/2</span>" in bar
    assert "validation/<wbr>loss</th>" in bar
    assert ">max_epochs=2 reached</td>" in result
    assert result.count("<svg") == 2, "a curve of each value"
    assert "image/png" in plot[0]["data"]
    assert sum("data" in each for each in ranks) == 2, "one bar for both processes, and the result"


def test_other_ranks_show_nothing(drive):
    run = drive(ProgressBar(), is_main=False, results=[{"loss": 0.5}])
    with terminal() as screen:
        run.fit()
        run.trainer.test(run.task, run.train_data)
    assert screen.text == ""
