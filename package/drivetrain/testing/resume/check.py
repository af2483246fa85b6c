"""Check that a program, or a Trainer made in a test, gives the same run after it is killed and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.validation import count
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.resume.fits import RunRecorder
from drivetrain.testing.resume.recording import KILLED, RESUMED, UNINTERRUPTED, Recorded, Recording, read
from drivetrain.testing.resume.report import Report, compare
from drivetrain.trainer.observer import observing

_LAST_LINES = 15

_Start = Callable[[Recording], tuple[int, str]]
"""Runs a program with its fits recorded; returns its exit code and its output."""


class ProgramError(DrivetrainError):
    """The checked program failed, or does not train."""


@dataclass(frozen=True)
class Check:
    """The settings of a check.

    Attributes:
        steps: Steps to compare.
        save_after: The step to save after. The run is killed at most two steps later. The default is in
            the middle.
        epoch: Steps in each epoch, so that the comparison covers the end of one. By default epochs keep
            their length.
        ignore: Patterns of the names of values and weights that may differ, such as "history/*" or "net.0.*".
        timeout: Time limit of each of the three runs, in seconds; None disables it.
        fit: The fit of the program to check, counted from 1. Earlier fits run unchanged.

    Raises:
        ConfigError: The numbers are inconsistent.
    """

    steps: int = 10
    save_after: int | None = None
    epoch: int | None = None
    ignore: Sequence[str] = ()
    timeout: float | None = 600.0
    fit: int = 1

    def __post_init__(self) -> None:
        count("steps", self.steps, at_least=2)
        count("fit", self.fit, at_least=1)
        if self.save_after is not None:
            count("save_after", self.save_after, at_least=1)
        if self.epoch is not None:
            count("epoch", self.epoch, at_least=1)
        if self.save_after is not None and self.save_after >= self.steps:
            raise ConfigError(
                f"save_after={self.save_after} of {self.steps} steps leaves none to compare after the"
                f" resume. Give a smaller save_after, such as {self.steps // 2}, or more steps"
            )


def check_program(program: Sequence[str], check: Check, nproc: int | None = None) -> Report:
    """Run a program uninterrupted, killed and resumed, and compare the three runs.

    Args:
        program: A file and its arguments, or "-m", a module and its arguments.
        check: The settings.
        nproc: Processes to start with `drivetrain launch`. By default one process starts, and it may start
            others.

    Raises:
        ConfigError: The program does not exist, or makes too few steps.
        ProgramError: The program fails, or trains nothing. The message ends with its last lines of output.
    """
    check_exists(program)

    def start(recording: Recording) -> tuple[int, str]:
        numbers = ["-" if each is None else str(each) for each in (recording.save_after, recording.epoch)]
        words = ["-m", "drivetrain.testing.resume.program", str(recording.directory), recording.kind]
        words += [str(recording.steps), *numbers, str(recording.fit), *program]
        launcher = [] if nproc is None else ["-m", "drivetrain", "launch", "--devices", str(nproc)]
        log = recording.directory / f"output-{recording.kind}"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
            try:
                code = process.wait(check.timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise ProgramError(f"the {recording.kind} run took longer than {check.timeout:g} s") from None
        return code, log.read_text(encoding="utf-8", errors="replace")

    return _check(start, check)


def check_exists(program: Sequence[str]) -> None:
    if not program or (program[0] == "-m" and len(program) < 2):
        raise ConfigError("no program given. Give its file, or -m and a module")
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise ConfigError(f"no file {program[0]!r}; for a module, write -m before its name")


def assert_resumable(
    make: Callable[[], Sequence[Any]],
    *,
    steps: int = 10,
    save_after: int | None = None,
    epoch: int | None = None,
    ignore: Sequence[str] = (),
    world_size: int = 1,
    timeout: float = 300.0,
) -> None:
    """Check that a run that is killed and resumed equals an uninterrupted one, to the last bit.

    Each of the three runs has its own processes. The Trainer's `run_dir`, `checkpoint`, `loggers` and
    `log_every` are replaced, so nothing is written to the directories they name.

    Args:
        make: Returns a new Trainer, task, training data and optionally validation data at each call. It must
            be importable on systems that spawn processes.
        steps: Steps to compare.
        save_after: The step to save after. The run is killed at most two steps later. The default is in
            the middle.
        epoch: Steps in each epoch, so that the comparison covers the end of one. By default epochs keep
            their length.
        ignore: Patterns of the names of values and weights that may differ, such as "history/*" or "net.0.*".
        world_size: The number of processes.
        timeout: Time limit of each of the three runs, in seconds.

    Raises:
        AssertionError: The runs differ. The message names the first difference and its likely causes.
        ConfigError: The numbers are inconsistent, the fit makes too few steps, or a pattern of `ignore`
            matches no name.
        ProgramError: `make` or the fit fails.
    """
    count("world_size", world_size, at_least=1)
    report = check_fit(make, Check(steps, save_after, epoch, ignore, timeout), world_size)
    assert report.is_good, str(report)


def check_fit(make: Callable[[], Sequence[Any]], check: Check, world_size: int = 1) -> Report:
    """Compare the three runs of a fit, as `assert_resumable` does, and return the report."""
    timeout = check.timeout or 300.0

    def start(recording: Recording) -> tuple[int, str]:
        try:
            run_distributed(_fit, make, recording, world_size=world_size, timeout=timeout)
        except TimeoutError:
            raise ProgramError(f"the {recording.kind} run took longer than {timeout:g} s") from None
        except RuntimeError as error:
            return 1, str(error)
        return 0, ""

    return _check(start, check)


def _fit(make: Callable[[], Sequence[Any]], recording: Recording) -> None:
    recorder = RunRecorder(replace(recording, fit=sys.maxsize))
    with observing(recorder):
        trainer, task, *data = make()  # may run fits itself
        recorder.checks_next()
        trainer.fit(task, *data)


def _check(start: _Start, check: Check) -> Report:
    with _scratch() as directory:
        recording = Recording(directory, UNINTERRUPTED, check.steps, None, check.epoch, check.fit)
        uninterrupted = _run_to_end(start, recording)
        made = min(len(each.steps) for each in uninterrupted)
        save_after = max(made // 2, 1) if check.save_after is None else check.save_after
        if made <= save_after:
            raise ConfigError(
                f"the program made {made} steps, too few to continue after a resume at step {save_after}."
                " Let it train longer, save earlier, or check another of its fits"
            )
        killed = _run_and_kill(start, replace(recording, kind=KILLED, save_after=save_after, steps=made))
        resumed = _run_to_end(start, replace(recording, kind=RESUMED, save_after=save_after))
        if resumed[0].base == uninterrupted[0].base:
            raise ProgramError("the resumed run found no checkpoint of the killed run and started over")
        return compare(uninterrupted, killed, resumed, check.ignore)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="drivetrain-resume-") as directory:
        yield Path(directory)


def _run_to_end(start: _Start, recording: Recording) -> list[Recorded]:
    """Run the program, check that its fit was recorded to the end, and return the record of each rank."""
    code, output = start(recording)
    recorded = read(recording.directory, recording.kind)
    failed = next((each.failed for each in recorded if each.failed is not None), None)
    if failed is None and recorded and all(each.is_whole for each in recorded):
        return recorded  # an error after the fit may come from the short training
    what = "ended without a Trainer's fit or steps; a loop over Engine alone is not recorded"
    if failed is not None:
        what = f"failed {failed}"
    elif code:
        what = f"failed with exit code {code}"
    raise ProgramError(f"the {recording.kind} run {what}{_last(output)}")


def _run_and_kill(start: _Start, recording: Recording) -> list[Recorded]:
    code, output = start(recording)
    recorded = read(recording.directory, recording.kind)
    if not any(each.is_killed for each in recorded):  # the other ranks may have been killed because of it
        raise ProgramError(
            f"the run ended with exit code {code} before it could be killed, soon after step"
            f" {recording.save_after}{_last(output)}"
        )
    return recorded


def _last(output: str) -> str:
    lines = output.strip().splitlines()[-_LAST_LINES:]
    return "".join(f"\n    {line}" for line in lines)
