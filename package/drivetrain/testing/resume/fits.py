"""Has one fit of a program recorded, stopped and saved, whatever else the program does."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from drivetrain.callbacks.unsaved_tensors import WARNING
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.testing.resume.digests import short
from drivetrain.testing.resume.recording import KILLED, RESUMED, Recorder, Recording, first_update

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

Step = TypeVar("Step")


class RunRecorder:
    """Has one fit of this process recorded, stopped and saved, and all kept from the user's directories.

    The program ends where its next run would begin.

    Args:
        recording: What is to be done.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._fits = 0
        self._recorder: Recorder | None = None
        self._body: int | None = None  # after which update the body of a loop runs
        self._is_left = False

    def checks_next(self) -> None:
        """Record the next fit, however many there have been."""
        self._recording = dataclasses.replace(self._recording, fit=self._fits + 1)

    def begins(self, trainer: Trainer, task: Any, data: tuple[Any, ...]) -> Mapping[str, Any]:
        """What a fit is run with in place of its own settings."""
        recording = self._recording
        if self._fits >= recording.fit:
            self._leave()
        changes = dict(self.evaluates(trainer))
        self._fits += 1
        checked = self._fits == recording.fit
        changes["run_dir"] = self._place(trainer.run_dir, f"fit-{self._fits}")
        changes["loggers"] = _own_loggers(trainer.loggers)
        changes["progress_bar"] = False
        if not checked:
            return changes
        warnings.filterwarnings("ignore", WARNING)  # what is compared tells whether anything depends on them
        every = None
        if recording.kind == KILLED:  # an interval that passes once after the update that it begins at
            every = f"{first_update(recording.directory) + (recording.save_after or 0)} steps"
        policy = self._policy(trainer, f"fit-{self._fits}")
        changes["checkpoint"] = dataclasses.replace(policy, every=every, best=0, by=None)
        self._recorder = Recorder(recording, data, tuple(trainer.callbacks))
        changes["callbacks"] = (*trainer.callbacks, self._recorder)
        changes["log_every"] = f"{recording.log_every} steps"
        if recording.epoch is not None:
            batches = recording.epoch * trainer.gradient_accumulation_steps
            changes["limit_train_batches"] = min(batches, trainer.limit_train_batches or batches)
        if recording.kind == RESUMED:
            changes["resume"] = "auto"
        return changes

    def loops(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """The updates of a loop, to know when its body runs."""
        with closing(steps):
            for step in steps:
                self._body = None if self._recorder is None else self._recorder.update
                yield step
                self._body = None

    def ends(self, error: BaseException) -> None:
        """The program has ended with an exception: a failure of its loop's, if it came from there.

        A loop that is left by an exception cannot tell it from a break, and ends in order. What a program
        raises after its loop may come of so short a training, which is of no interest.
        """
        in_order = isinstance(error, SystemExit) and error.code in (None, 0)
        if self._body is not None and self._recorder is not None and not in_order:
            self._recorder.failed(error, self._body)

    def evaluates(self, trainer: Trainer) -> Mapping[str, Any]:
        """Where an evaluation looks for a checkpoint: of an earlier fit, or of the one that it is within."""
        if self._recorder is not None and self._recorder.is_over:
            self._leave()
        changes: dict[str, Any] = {}
        if trainer.run_dir is not None:
            changes["run_dir"] = self._place(trainer.run_dir, "")
        if isinstance(trainer.checkpoint, CheckpointConfig) and trainer.checkpoint.directory is not None:
            changes["checkpoint"] = self._policy(trainer, "")
        return changes

    def _leave(self) -> NoReturn:
        """All is recorded: end the program, and at once if it has caught that and goes on."""
        if self._is_left:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._is_left = True
        raise SystemExit(0)

    def _policy(self, trainer: Trainer, name: str) -> CheckpointConfig:
        policy = trainer.checkpoint
        if not isinstance(policy, CheckpointConfig):
            return CheckpointConfig(asynchronous=policy == "async")
        if policy.directory is None:
            return policy
        return dataclasses.replace(policy, directory=self._place(policy.directory, name))

    def _place(self, given: Any, name: str) -> Path:
        """A directory in place of the user's, the same for the same."""
        kind = self._recording.kind
        if kind == RESUMED and self._fits == self._recording.fit:
            kind = KILLED  # whose checkpoint it goes on from
        known = name if given is None else f"dir-{short(os.path.abspath(os.fspath(given)).encode())}"
        return self._recording.directory / f"files-{kind}" / known


def _own_loggers(given: Any) -> Any:
    """Loggers that write to the run directory; others may write anywhere."""
    if isinstance(given, str):
        return given
    return tuple(each for each in given if isinstance(each, str)) if isinstance(given, (list, tuple)) else ()
