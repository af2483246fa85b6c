"""A directory with a user's modules, and the command line in this process."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.support.messages import unconfigured

from drivetrain.cli.main import main
from drivetrain.cli.references import importable_here
from drivetrain.cli.settings import Settings

PROGRAMS = Path(__file__).with_name("programs")
QUIET = ["--trainer.progress_bar=false", "--trainer.strategy", "cpu"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copy(PROGRAMS / "shapes.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def settings(line):
    with importable_here():
        return Settings("fit", "train", line.split())


@pytest.fixture
def typed(here):  # what a task of `programs/typed.py` is given by a line
    shutil.copy(PROGRAMS / "typed.py", here)
    return lambda line: settings(f"--task typed.Typed {line}").make("task").given


@pytest.fixture(autouse=True)
def as_a_program(warns_as_expected, monkeypatch):
    """Messages go to stderr, as of a command that configures no logging, and lines have 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with unconfigured():
        yield


@pytest.fixture
def drive(here, capsys):  # run `drivetrain` with a quiet trainer; returns the exit code, stdout and stderr

    def run(command, line="", *, quiet=True):
        loggers = [] if "--trainer.loggers" in line else ["--trainer.loggers="]
        code = main([command, *line.split(), *(QUIET + loggers if quiet else [])])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refuse(drive):  # run lines that are refused, by a part of their message; lists all that differ

    def run(command, lines, code=2):
        wrong = []
        for line, word in lines.items():
            found = drive(command, line, quiet=False)
            text = found[2]
            right = word in text and text.startswith("drivetrain: ") and "Traceback" not in text
            wrong += [] if right and found[:2] == (code, "") else [f"{line}: {found}"]
        assert not wrong, "\n".join(wrong)

    return run
