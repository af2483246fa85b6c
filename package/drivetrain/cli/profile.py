"""`drivetrain profile`: run a program's fit for some steps, and say what the time went to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.callbacks import Profile
from drivetrain.checkpoint.saving.config import as_policies
from drivetrain.cli.parser import Parser, program_words
from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import count
from drivetrain.distributed.launch.environment import detect
from drivetrain.run.settings import RunSettings
from drivetrain.testing.resume.check import ProgramError, check_exists
from drivetrain.testing.resume.program import run_as_main
from drivetrain.trainer.observer import observing

Step = TypeVar("Step")


def run(words: Sequence[str]) -> int:
    """Profile a program's first fit, print the table and the paths of the files, and return the exit code."""
    parsed = _parser().parse_args(words)
    program = program_words(parsed)
    check_exists(program)
    kinds, steps = parsed.kinds.split(","), count("--steps", parsed.steps, at_least=2)
    folder, job = Path(parsed.folder).absolute(), detect(os.environ)
    is_first = job is None or job.rank == 0
    if is_first and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{parsed.folder!r} has files already. Remove them, or give another --folder")
    schedule = None if kinds == ["table"] else _last(steps)
    profile = Profile(schedule, kinds, _ranks(parsed.ranks), folder=folder, show=False)
    observer = _FirstFit(profile, steps, folder / "run")
    try:
        with observing(observer):
            run_as_main(program)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        if is_first:
            _print(profile.files)
    if not observer.has_begun:
        raise ProgramError(
            "the program ended without a Trainer's fit or steps, so there is nothing to profile"
        )
    return 0


class _FirstFit:
    """Has the first fit of this process profiled, and ends the program where the run after it would begin.

    Args:
        run_dir: Where the fit writes, instead of the program's own directories.
    """

    def __init__(self, profile: Profile, steps: int, run_dir: Path) -> None:
        self.has_begun = False
        self._profile = profile
        self._steps = steps
        self._run_dir = run_dir

    def begins(self, trainer: RunSettings) -> Mapping[str, Any]:
        """Return the settings to replace."""
        self.evaluates(trainer)
        self.has_begun = True
        others = [each for each in trainer.callbacks if not isinstance(each, Profile)]
        policies: Any = trainer.checkpoint
        if not isinstance(policies, (bool, str)):
            policies = [dataclasses.replace(each, directory=None) for each in as_policies(policies)]
        return {
            **dict.fromkeys(("max_epochs", "max_time", "min_epochs", "min_steps", "dry_run", "resume")),
            "max_steps": self._steps,
            "callbacks": (*others, self._profile),
            "checkpoint": policies,
            "run_dir": self._run_dir,
        }

    def loops(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """Return the steps of a loop unchanged."""
        return steps

    def evaluates(self, trainer: RunSettings) -> Mapping[str, Any]:
        """Run an evaluation unchanged before the fit, and end the program at one after it."""
        if self.has_begun:
            raise SystemExit(0)
        return {}


def _last(steps: int) -> dict[str, int]:
    """Return the schedule of the last steps."""
    active = min(3, steps - 1)
    warmup = min(2, steps - active)
    return {"wait": steps - active - warmup, "warmup": warmup, "active": active, "repeat": 1}


def _ranks(text: str) -> list[int] | str:
    if text == "all":
        return text
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks takes numbers, such as 0,1, or all, not {text!r}") from None


def _print(files: Sequence[Path]) -> None:
    for path in files:
        if path.name.startswith("table") and path.suffix == ".txt":
            print(path.read_text(encoding="utf-8"))
    for path in files:
        print(os.path.relpath(path))


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain profile",
        description="Run steps of a program's first fit, print the time of each phase, and trace the last.",
        epilog="The program ends where the run after its first fit would begin.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=20, metavar="N", help="steps to run; default: 20")
    add(
        "--kinds",
        default="table,trace",
        metavar="KINDS",
        help="some of table, trace, memory and python; default: table,trace",
    )
    add("--ranks", default="0", metavar="RANKS", help="ranks to profile, or all; default: 0")
    add("--folder", default="profile", metavar="DIR", help="where to write; default: profile")
    parser.add_program()
    return parser
