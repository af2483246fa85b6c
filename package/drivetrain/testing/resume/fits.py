"""Record, stop and save one fit of a program; the rest of the program runs unchanged."""

from __future__ import annotations

import dataclasses
import os
import sys
import zlib
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.int_schedule import most
from drivetrain.run.settings import known_accumulation
from drivetrain.testing.resume.recording import KILLED, RESUMED, Recorder, Recording

if TYPE_CHECKING:
    from drivetrain.run.settings import RunSettings

Step = TypeVar("Step")


class RunRecorder:
    """Records, stops and saves one fit of this process, and redirects all runs to temporary directories.

    The program is ended where the run after the recorded fit would begin.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._fits = 0
        self._recorder: Recorder | None = None
        self._body: int | None = None  # the last step while a loop's body runs, else None
        self._has_ended = False

    def checks_next(self) -> None:
        """Record the next fit, however many there were before it."""
        self._recording = dataclasses.replace(self._recording, fit=self._fits + 1)

    def begins(self, trainer: RunSettings) -> Mapping[str, Any]:
        """Return the settings to replace for a fit that begins."""
        recording = self._recording
        if self._fits >= recording.fit:
            self._end_program()
        changes = dict(self.evaluates(trainer))
        self._fits += 1
        checked = self._fits == recording.fit
        changes["run_dir"] = self._folder(trainer.run_dir, f"fit-{self._fits}")
        changes["loggers"] = _loggers(trainer.loggers)
        changes["progress_bar"] = False
        if not checked:
            return changes
        policy = self._policies(trainer, f"fit-{self._fits}")[0]
        changes["checkpoint"] = dataclasses.replace(policy, every=None, best=0, by=None)
        self._recorder = Recorder(recording)
        changes["callbacks"] = (*trainer.callbacks, self._recorder)
        changes["log_every"] = "1 step"
        if recording.epoch is not None:
            batches = recording.epoch * most(known_accumulation(trainer))
            changes["limit_train_batches"] = min(batches, trainer.limit_train_batches or batches)
        if recording.kind == RESUMED:
            changes["resume"] = "auto"
        return changes

    def loops(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """Yield the steps of a loop, and note when its body runs."""
        with closing(steps):
            for step in steps:
                self._body = None if self._recorder is None else self._recorder.step
                yield step
                self._body = None

    def ends(self, error: BaseException) -> None:
        """Record an exception that ended the program as a failure if the body of its loop raised it.

        The generator of a loop cannot tell an exception in the body from a break. An exception after the
        loop may come from the short training, so it is ignored.
        """
        in_order = isinstance(error, SystemExit) and error.code in (None, 0)
        if self._body is not None and self._recorder is not None and not in_order:
            self._recorder.failed(error, self._body)

    def evaluates(self, trainer: RunSettings) -> Mapping[str, Any]:
        """Return the directories in which an evaluation finds checkpoints of this or an earlier fit."""
        if self._recorder is not None and self._recorder.is_over:
            self._end_program()
        changes: dict[str, Any] = {}
        if trainer.run_dir is not None:
            changes["run_dir"] = self._folder(trainer.run_dir, "")
        if any(each.directory is not None for each in chosen_policies(trainer.checkpoint)):
            changes["checkpoint"] = self._policies(trainer, "")
        return changes

    def _end_program(self) -> NoReturn:
        """End the program, and kill the process at once if the program caught the first SystemExit."""
        if self._has_ended:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._has_ended = True
        raise SystemExit(0)

    def _policies(self, trainer: RunSettings, name: str) -> list[CheckpointConfig]:
        policies = chosen_policies(trainer.checkpoint)
        if not policies:
            return [CheckpointConfig(asynchronous=trainer.checkpoint == "async")]
        return [
            each
            if each.directory is None
            else dataclasses.replace(each, directory=self._folder(each.directory, name))
            for each in policies
        ]

    def _folder(self, given: Any, name: str) -> Path:
        """Return a temporary directory for a user's directory; equal paths give equal ones."""
        kind = self._recording.kind
        if kind == RESUMED and self._fits == self._recording.fit:
            kind = KILLED  # it resumes from the killed run's checkpoint
        text = "" if given is None else os.path.abspath(os.fspath(given))
        folder = f"dir-{zlib.crc32(text.encode())}" if text else name
        return self._recording.directory / f"files-{kind}" / folder


def _loggers(given: Any) -> tuple[str, ...]:
    """Return the loggers given by name, which write to the run directory, with the one that is read."""
    names = (given,) if isinstance(given, str) else given if isinstance(given, (list, tuple)) else ()
    return (*(each for each in names if isinstance(each, str) and each != "jsonl"), "jsonl")
