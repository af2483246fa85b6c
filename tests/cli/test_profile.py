"""`drivetrain profile` runs a program's first fit for some updates, and leaves its own directories alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.callbacks.test_profile import calls, updates
from tests.support.forked import Forked

from drivetrain import ConfigError
from drivetrain.cli.profile import run

COMMAND = """
import sys
from drivetrain.cli.main import main
raise SystemExit(main(["profile", *sys.argv[1:]]))
"""

PROGRAM = """
import sys
from pathlib import Path
from drivetrain import Profile, Trainer
from tests.support.tasks import Regression, pairs

settings = {"strategy": "cpu", "progress_bar": False, "run_dir": "own", "loggers": "csv", **SETTINGS}
trainer = Trainer(max_epochs=1, callbacks=[Profile(kinds="python")], **settings)
assert sys.argv[1:] == ["--rate", "1"]
"""

FIT = """
trainer.fit(Regression(), pairs(), pairs(4))
print("the fit has ended")
trainer.validate(Regression(), pairs(4))
print("not reached")
"""


def profiled(folder: Path, lines: str, *options: str, **settings: Any) -> tuple[int | None, str, str]:
    """Profile a program of these lines; return its exit code and its output."""
    root = str(Path(__file__).parents[2])
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    program = PROGRAM.replace("SETTINGS", repr(settings))
    (folder / "train.py").write_text(program + lines, encoding="utf-8")
    (folder / "command.py").write_text(COMMAND, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    arguments = [str(folder / "command.py"), *options, "train.py", "--rate", "1"]
    process = Forked(arguments, cwd=folder, env=environment)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.full
def test_the_first_fit_runs_some_updates_and_the_rest_of_the_program_does_not(tmp_path: Path) -> None:
    code, out, err = profiled(tmp_path, FIT, "--steps", "8")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "the fit has ended"
    assert lines[1].startswith("profile of updates 0 to 7 on rank 0, 'cpu'")
    assert lines[-3:] == [
        "profile/trace-updates-5-7-rank-0.json.gz",
        "profile/table-updates-0-7-rank-0.txt",
        "profile/table-updates-0-7-rank-0.json",
    ]
    assert updates(tmp_path / lines[-3]) == ["5", "6", "7"]
    found = calls(tmp_path / "profile")
    assert (found["step"], found["validation"]) == (8, 1)
    assert found["CSVLogger"] >= 2
    assert not (tmp_path / "own").exists()
    assert (tmp_path / "profile" / "run" / "checkpoints").is_dir()
    code, _, err = profiled(tmp_path, FIT, "--steps", "8")
    assert code == 2
    assert "drivetrain: 'profile' has files already. Remove them, or give another --folder" in err


def test_a_loop_an_error_and_a_program_without_a_fit(tmp_path: Path) -> None:
    loop = "for step in trainer.steps(Regression(), pairs()): 1 / (step.update - 4)"
    code, out, err = profiled(tmp_path, loop, "--folder", "found", "--kinds", "table")
    assert code == 1
    assert "ZeroDivisionError" in err
    assert out.splitlines()[-1] == "found/table-updates-0-4-rank-0.json"
    code, _, err = profiled(tmp_path, "", "--folder", "other")
    assert code == 1
    assert "without a Trainer's fit or steps, so there is nothing to profile" in err


@pytest.mark.full
def test_the_ranks_that_a_program_starts_are_profiled_too(tmp_path: Path) -> None:
    options = ("--steps", "4", "--ranks", "all", "--kinds", "trace")
    code, out, err = profiled(tmp_path, FIT, *options, strategy="ddp", devices=2)
    assert code == 0, err
    assert out.splitlines()[-2:] == [f"profile/trace-updates-1-3-rank-{rank}.json.gz" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "1", "train.py"], "--steps must be a whole number, at least 2, not 1"),
        (["--ranks", "first", "train.py"], "--ranks takes numbers, such as 0,1, or all, not 'first'"),
        (["--kinds", "tabel", "train.py"], "Did you mean 'table'"),
        (["gone.py"], "no file 'gone.py'"),
    ],
)
def test_wrong_words_are_told(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('not run')", encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        run(words)
