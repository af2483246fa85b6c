"""`drivetrain profile` runs a program's first fit for some steps, and leaves its own directories alone."""

import os
from pathlib import Path
from typing import Any

from tests.callbacks.test_profile import calls, steps
from tests.cli.conftest import PROGRAMS
from tests.support.forked import run_forked

PROGRAM = """
import sys
from drivetrain import Profile, Trainer
from tests.support.tasks import Regression, pairs

settings = {"strategy": "cpu", "progress_bar": False, "run_dir": "own", "loggers": "csv", **SETTINGS}
trainer = Trainer(max_epochs=1, callbacks=[Profile(kinds="memory")], **settings)
assert sys.argv[1:] == ["--rate", "1"]
"""
FIT = """
trainer.fit(Regression(), pairs(), pairs(4))
print("the fit has ended")
trainer.validate(Regression(), pairs(4))
print("not reached")
"""


def profiled(folder: Path, lines: str, *options: str, **settings: Any) -> tuple[int | None, str, str]:
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    program = PROGRAM.replace("SETTINGS", repr(settings))
    (folder / "train.py").write_text(program + lines, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    words = [str(PROGRAMS / "command.py"), "profile", *options, "train.py", "--rate", "1"]
    done = run_forked(words, folder, environment, timeout=600)
    return done.returncode, done.stdout, done.stderr


def test_profile_runs_the_first_fit_and_not_the_rest_of_the_program(tmp_path: Path) -> None:
    code, out, err = profiled(tmp_path, FIT, "--steps", "8")
    assert code == 0, err
    lines = out.splitlines()
    assert out.startswith("the fit has ended\nprofile of steps 0 to 7 on rank 0, 'cpu'")
    tables = [f"profile/table-steps-0-7-rank-0.{kind}" for kind in ("txt", "json")]
    assert lines[-3:] == ["profile/trace-steps-5-7-rank-0.json.gz", *tables]
    assert steps(tmp_path / lines[-3]) == ["5", "6", "7"]
    found = calls(tmp_path / "profile")
    assert (found["step"], found["validation"]) == (8, 1)
    assert found["CSVLogger"] >= 2
    assert not (tmp_path / "own").exists()
    assert (tmp_path / "profile" / "run" / "checkpoints").is_dir()
    code, _, err = profiled(tmp_path, FIT, "--steps", "8")
    assert (code, "'profile' has files already. Remove them, or give another --folder" in err) == (2, True)


def test_profile_of_a_loop_an_error_and_a_program_without_a_fit(tmp_path: Path) -> None:
    loop = "for result in trainer.steps(Regression(), pairs()): 1 / (result.step - 4)"
    code, out, err = profiled(tmp_path, loop, "--folder", "found", "--kinds", "table")
    assert (code, "ZeroDivisionError" in err) == (1, True)
    assert out.splitlines()[-1] == "found/table-steps-0-4-rank-0.json"
    code, _, err = profiled(tmp_path, "", "--folder", "other")
    assert (code, "without a Trainer's fit or steps, so there is nothing to profile" in err) == (1, True)
