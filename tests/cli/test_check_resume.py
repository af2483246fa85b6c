"""`drivetrain check-resume` tells a program that fails from one that it has ended early itself."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli.main import main

landing, nightly = pytest.mark.landing, pytest.mark.nightly  # each run of a program is a new interpreter

PROGRAM = """
import sys
from drivetrain import LambdaCallback, Trainer
from tests.testing.resume.test_resumable import Net, loader

settings = {"strategy": "cpu", "loggers": (), "run_dir": "run", "progress_bar": False}
loop = Trainer(max_epochs=3, **settings).steps
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """Checks a program that ends with these lines; returns the exit code and what was told."""
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(lines: str, *options: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(PROGRAM + lines, encoding="utf-8")
        code = main(["check-resume", "--updates", "6", *options, "train.py"])
        return code, "".join(capfd.readouterr())

    return run


CAUGHT = """
fails = LambdaCallback(on_step_end=lambda run: 1 / 0)
try:
    Trainer(max_steps=2, callbacks=[fails], **settings).fit(Net(), loader())
except ZeroDivisionError:
    pass
"""
FAILURES = {
    "for step in loop(Net(), loader()): step.loss.item()": "failed after update 1: AttributeError: 'float'",
    "for step in loop(Net(), loader()): step.update < 3 or sys.exit('too slow')": "    too slow\n",
    CAUGHT: "failed after update 1: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize(
    "lines",
    [pytest.param(each, marks=landing if each is CAUGHT else nightly) for each in FAILURES],
    ids=["at once", "exit", "caught"],
)
def test_an_error_in_a_fit_or_in_the_body_of_a_loop_is_told(check: Check, lines: str) -> None:
    code, text = check(lines)
    assert (code, "drivetrain: the uninterrupted run " in text) == (1, True), text
    assert FAILURES[lines] in text


EVALUATES = """
for step in loop(Net(), loader()):
    assert Trainer(strategy="cpu").validate(Net(), loader())
    if step.update == 4:
        break
sys.exit()
"""
CATCHES_ALL = """
while True:
    try:
        Trainer(max_epochs=3, **settings).fit(Net(), loader())
    except BaseException as error:
        print("caught", repr(error))
"""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        pytest.param(CATCHES_ALL, "6 updates, killed, resumed at update 3", marks=landing, id="all"),
        pytest.param(EVALUATES, "5 updates, killed, resumed at update 1", marks=nightly, id="loop"),
    ],
)
def test_a_program_that_resumes_exactly_passes(check: Check, lines: str, told: str) -> None:
    code, text = check(lines)
    assert code == 0, text
    assert f"{told}: the runs are identical" in text
