"""`drivetrain check-resume` tells a program that fails from one that it has ended early itself."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli.main import main

PROGRAM = """
from drivetrain import LambdaCallback, Trainer
from tests.testing.resume.test_resumable import Net, loader

settings = {"strategy": "cpu", "loggers": (), "run_dir": "run", "progress_bar": False}
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(lines: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(PROGRAM + lines, encoding="utf-8")
        code = main(["check-resume", "--steps", "6", "train.py"])
        return code, "".join(capfd.readouterr())

    return run


CAUGHT = """
fails = LambdaCallback(on_step_end=lambda run: 1 / 0)
try:
    Trainer(max_steps=2, callbacks=[fails], **settings).fit(Net(), loader())
except ZeroDivisionError:
    pass
"""
CATCHES_ALL = """
while True:
    try:
        Trainer(max_epochs=3, **settings).fit(Net(), loader())
    except BaseException as error:
        print("caught", repr(error))
"""


TOLD = {
    CAUGHT: "failed after step 1: ZeroDivisionError: division by zero",
    CATCHES_ALL: "6 steps, killed, resumed at step 3: the runs are identical",
}


@pytest.mark.landing  # each run of a program is a new interpreter
@pytest.mark.parametrize("lines", TOLD, ids=["fails", "resumes"])
def test_check_resume_tells_an_error_and_passes_an_exact_program(check: Check, lines: str) -> None:
    code, text = check(lines)
    assert (code, TOLD[lines] in text) == (int(lines is CAUGHT), True), text
    assert ("drivetrain: the uninterrupted run " in text) == (lines is CAUGHT)
