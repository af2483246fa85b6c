"""Whether a program, or a test's own runs, can be killed and resumed without a difference."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from drivetrain.distributed.forking import collect_own, uncollected
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.observing import observing
from drivetrain.options import count
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.resume.fits import RunRecorder
from drivetrain.testing.resume.recording import KILLED, RESUMED, STRAIGHT, Recording
from drivetrain.testing.resume.report import Report, compare
from drivetrain.testing.resume.rows import read

_LAST_LINES = 15


class ProgramError(DrivetrainError):
    """A program that is checked has failed, or does not train."""


class _Start(Protocol):
    """Runs a program with its fits recorded; returns its exit code and what it wrote."""

    def __call__(self, recording: Recording) -> tuple[int, str]: ...


@dataclass(frozen=True)
class Check:
    """How a program is checked.

    Attributes:
        updates: How many updates are compared.
        save_after: After which update it is saved; it is killed up to two updates later. None for the middle.
        epoch: Updates of an epoch, to see the end of one within so few updates; None for as many as there
            are.
        ignore: Patterns of names that may differ, such as "callback History.*".
        timeout: Seconds that each of the three runs may take; None for no limit.
        fit: Which fit of the program is checked, from 1; those before it are run as they are.

    Raises:
        ConfigError: Numbers that do not fit together.
    """

    updates: int = 10
    save_after: int | None = None
    epoch: int | None = None
    ignore: Sequence[str] = ()
    timeout: float | None = 600.0
    fit: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        count("updates", self.updates, at_least=2)
        count("fit", self.fit, at_least=1)
        if self.save_after is not None:
            count("save_after", self.save_after, at_least=1)
        if self.epoch is not None:
            count("epoch", self.epoch, at_least=1)
        if self.save_after is not None and self.save_after >= self.updates:
            raise ConfigError(
                f"save_after={self.save_after} of {self.updates} updates: none would come after the resume."
                f" Give a smaller save_after, such as {self.updates // 2}, or more updates"
            )


def check_program(program: Sequence[str], check: Check, nproc: int | None = None) -> Report:
    """Run a program three times: through, killed, and resumed; and compare.

    Args:
        program: A file and its arguments, or "-m", a module and its arguments.
        check: What is compared.
        nproc: How many processes to start it as; None for one, which may start others by itself.

    Raises:
        ConfigError: There is no such program, or it makes too few updates.
        ProgramError: It fails, or trains nothing; has its last lines.
    """
    if not program or (program[0] == "-m" and len(program) < 2):
        raise ConfigError("which program? Give its file, or -m and a module")
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise ConfigError(f"there is no program {program[0]!r} here; for a module, write -m before its name")

    def start(recording: Recording) -> tuple[int, str]:
        numbers = ["-" if each is None else str(each) for each in (recording.save_after, recording.epoch)]
        words = ["-m", "drivetrain.testing.resume.program", str(recording.directory), recording.kind]
        words += [str(recording.updates), *numbers, str(recording.fit), *program]
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


def assert_resumable(
    make: Callable[[], Sequence[Any]],
    *,
    updates: int = 10,
    save_after: int | None = None,
    epoch: int | None = None,
    ignore: Sequence[str] = (),
    world_size: int = 1,
    timeout: float = 300.0,
) -> None:
    """See that a run that is killed and resumed is the run that was not, in processes of their own.

    What the Trainer says of `run_dir`, `checkpoint`, `loggers` and `log_every` is replaced; nothing is
    written where it points.

    Args:
        make: Returns a Trainer, a task, training data and, if there is some, validation data: new ones each
            time. On systems that spawn processes it must be one that can be imported.
        updates: How many updates are compared.
        save_after: After which update it is saved; it is killed up to two updates later. None for the middle.
        epoch: Updates of an epoch, to see the end of one within so few updates; None for as many as there
            are.
        ignore: Patterns of names that may differ, such as "callback History.*".
        world_size: On how many processes.
        timeout: In seconds, for each of the three runs.

    Raises:
        AssertionError: It is not; names the first difference, and what was not saved.
        ConfigError: Numbers that do not fit together, or a fit with too few updates.
        ProgramError: It fails by itself.
    """
    count("world_size", world_size, at_least=1)
    check = Check(updates, save_after, epoch, ignore, timeout)

    def start(recording: Recording) -> tuple[int, str]:
        if world_size == 1:
            return _alone(make, recording, timeout)
        try:
            run_distributed(_fit, make, recording, world_size=world_size, timeout=timeout)
        except RuntimeError as error:
            return 1, str(error)
        return 0, ""

    report = _check(start, check)
    assert report.is_good, str(report)


def _alone(make: Callable[[], Sequence[Any]], recording: Recording, timeout: float) -> tuple[int, str]:
    # Forked where that is safe, because a new interpreter would take seconds to import torch.
    method = "fork" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(method)
    log = recording.directory / f"output-{recording.kind}"
    process = context.Process(target=_child, args=(make, recording, log))
    with uncollected():
        process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise ProgramError(f"the {recording.kind} run took longer than {timeout:g} s")
    code = int(process.exitcode)
    process.close()
    return code, log.read_text(encoding="utf-8") if log.exists() else ""


def _child(make: Callable[[], Sequence[Any]], recording: Recording, log: Path) -> None:
    collect_own()
    torch.set_num_threads(1)
    code = 0
    try:
        _fit(make, recording)
    except BaseException:  # whatever it is, the parent is to hear of it
        log.write_text(traceback.format_exc(), encoding="utf-8")
        code = 1
    # Not by way of the parent's exit handlers, which a forked process has inherited.
    os._exit(code)


def _fit(make: Callable[[], Sequence[Any]], recording: Recording) -> None:
    recorder = RunRecorder(replace(recording, fit=sys.maxsize))
    with observing(recorder):
        trainer, task, *data = make()  # which may train, too
        recorder.checks_next()
        trainer.fit(task, *data)


def _check(start: _Start, check: Check) -> Report:
    with _scratch() as directory:
        straight = Recording(directory, STRAIGHT, check.updates, check.save_after, check.epoch, check.fit)
        _finished(start, straight)
        made = min(len(each.updates) for each in read(directory, STRAIGHT))
        save_after = _middle(made) if check.save_after is None else check.save_after
        if made <= save_after:
            raise ConfigError(
                f"the program made {made} updates: too few to resume after update {save_after} and go on. Let"
                " it train longer, save earlier, or check another of its fits"
            )
        _die(start, replace(straight, kind=KILLED, save_after=save_after, updates=made))
        _finished(start, replace(straight, kind=RESUMED, save_after=save_after))
        if read(directory, RESUMED)[0].start == read(directory, STRAIGHT)[0].start:
            raise ProgramError("the resumed run found no checkpoint of the killed one, and began anew")
        return compare(directory, check.ignore)


def _middle(updates: int) -> int:
    """An update in the middle, of an odd number, so that it is not one at which the recorded runs log."""
    return max(updates // 2 - 1, 1) | 1


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="drivetrain-resume-") as directory:
        yield Path(directory)


def _finished(start: _Start, recording: Recording) -> None:
    """A run to its end.

    Raises:
        ProgramError: It has none, or there was no fit.
    """
    code, output = start(recording)
    recorded = read(recording.directory, recording.kind)
    failed = next((each.failed for each in recorded if each.failed is not None), None)
    if failed is None and recorded and all(each.end is not None for each in recorded):
        return  # what the program makes of so short a training is of no interest
    what = "ended without a Trainer's fit or steps; a loop over Engine alone is not recorded"
    if failed is not None:
        what = f"failed {failed}"
    elif code:
        what = f"failed with exit code {code}"
    raise ProgramError(f"the {recording.kind} run {what}{_last(output)}")


def _die(start: _Start, recording: Recording) -> None:
    code, output = start(recording)
    recorded = read(recording.directory, recording.kind)
    if not any(each.killed for each in recorded):  # the other ranks may have been ended for it at once
        raise ProgramError(
            f"the run that was to be killed after {recording.save_after} updates or soon ended before, with"
            f" exit code {code}{_last(output)}"
        )


def _last(output: str) -> str:
    lines = output.strip().splitlines()[-_LAST_LINES:]
    return "".join(f"\n    {line}" for line in lines)
