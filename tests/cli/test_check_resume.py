"""`drivetrain check-resume` tells a program that fails from one that it has ended early itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli.main import main

PROGRAM = """
import sys
from drivetrain import LambdaCallback, Trainer
from tests.testing.resume.test_resumable import Net, loader

settings = {"strategy": "cpu", "loggers": (), "run_dir": "run", "progress_bar": False}
loop = Trainer(max_epochs=3, **settings).steps
"""

CAUGHT = """
fails = LambdaCallback(on_step_end=lambda run: 1 / 0)
try:
    Trainer(max_steps=2, callbacks=[fails], **settings).fit(Net(), loader())
except ZeroDivisionError:
    pass
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """Checks a program that ends with these lines; returns the exit code and what was told."""
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def run(lines: str, *options: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(PROGRAM + lines, encoding="utf-8")
        code = main(["check-resume", "--updates", "6", *options, "train.py"])
        return code, "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (  # left at once
            "for step in loop(Net(), loader()): step.loss.item()",
            "failed after update 1: AttributeError: 'float' object has no attribute 'item'",
        ),
        (  # left when the program ends
            "steps = loop(Net(), loader())\nfor step in steps: 1 / (step.update - 3)",
            "    ZeroDivisionError: division by zero\n",
        ),
        (  # left in the last update that is compared
            "for step in loop(Net(), loader()): 1 / (step.update - 5)",
            "failed after update 6: ZeroDivisionError",
        ),
        ("for step in loop(Net(), loader()): step.update < 3 or sys.exit('too slow')", "    too slow\n"),
        (CAUGHT, "failed after update 1: ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_in_a_fit_or_in_the_body_of_a_loop_is_told(check: Check, lines: str, told: str) -> None:
    code, text = check(lines)
    assert (code, "drivetrain: the uninterrupted run " in text) == (1, True), text
    assert told in text


@pytest.mark.full
def test_a_loop_that_is_left_in_order_is_no_failure_and_may_evaluate(check: Check) -> None:
    code, text = check("""
for step in loop(Net(), loader()):
    assert Trainer(strategy="cpu").validate(Net(), loader())
    if step.update == 4:
        break
sys.exit()
""")
    assert code == 0, text
    assert "5 updates, killed, resumed at update 1: the runs are identical" in text


@pytest.mark.full
def test_a_fit_that_goes_on_from_another_is_saved_where_it_is_to_be(check: Check) -> None:
    code, text = check(
        """
for steps in (4, 20):
    Trainer(max_steps=steps, **settings).fit(Net(), loader(), resume="auto")
""",
        *("--fit", "2", "--save-after", "5"),
    )
    assert code == 0, text
    assert "6 updates, killed, resumed at update 9: the runs are identical" in text


def test_a_program_that_catches_everything_and_tries_again_is_ended(check: Check) -> None:
    code, text = check(
        """
while True:
    try:
        Trainer(max_epochs=3, **settings).fit(Net(), loader())
    except BaseException as error:
        print("caught", repr(error))
""",
        *("--timeout", "40"),
    )
    assert code == 0, text
    assert "6 updates, killed, resumed at update 3: the runs are identical" in text
