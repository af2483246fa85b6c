"""The policy of a run for files that cannot be written: `Trainer(on_save_error=...)`."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from contextlib import suppress

from drivetrain.checkpoint.storage.filesystem import StorageError, in_words
from drivetrain.core.errors import CheckpointError
from drivetrain.core.messages import logger

_LOG = logger(__name__)

AGAIN = "The run goes on (on_save_error='warn'), and the next save that is due tries again"
"""The consequence for a checkpoint."""

OVER = "This was the last save of the run"
"""The consequence for the last checkpoint."""

LEFT_OUT = (
    "The run goes on (on_save_error='warn'). Later values are written if that is possible; these values are"
    " lost"
)
"""The consequence for logged values."""


class SaveErrors:
    """The policy of one run, and the errors so far.

    Args:
        policy: "raise", or "warn" to go on.
        reports: Whether this rank reports errors: only one does, because all fail together.

    Attributes:
        tolerates: Whether the run goes on.
        counts: The number of failures by kind: "checkpoint", or a logger's class.
    """

    def __init__(self, policy: str = "raise", reports: bool = True) -> None:
        self.tolerates = policy == "warn"
        self.counts: Counter[str] = Counter()
        self._reports = reports
        self._warned: set[tuple[str, str]] = set()

    def report(
        self, what: str, lost: str, error: Exception, last_checkpoint: str | None, then: str = AGAIN
    ) -> None:
        """Count a failure, and warn if its cause is new; one with a known cause is logged for debugging."""
        self.counts[what] += 1
        if not self._reports:
            return
        notes = "".join(f" ({each.removeprefix('drivetrain: ')})" for each in getattr(error, "__notes__", ()))
        text = f"{lost} was not saved: {words_of(error)}{notes}. {newest(last_checkpoint)}. {then}"
        cause = what, code_of(error)
        is_new = cause not in self._warned
        self._warned.add(cause)
        _LOG.log(logging.WARNING if is_new else logging.DEBUG, text)  # each cause once


def newest(last_checkpoint: str | None) -> str:
    """Return a sentence about the newest intact checkpoint."""
    if last_checkpoint is None:
        return "There is no checkpoint of this run yet"
    if is_gone(last_checkpoint):
        return f"The newest checkpoint, {last_checkpoint}, is not there any more"
    return f"The newest checkpoint is still {last_checkpoint}"


def is_gone(checkpoint: str) -> bool:
    """Return whether a checkpoint certainly no longer exists."""
    from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO  # for runs without checkpoints, never

    with suppress(CheckpointError):  # the storage does not answer, which proves nothing
        return not DirectoryCheckpointIO().exists(checkpoint)
    return False


def words_of(error: Exception) -> str:
    """Return the text of an error; a system error also gets the file and advice."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return in_words("write", error.filename, error)[0]
    return str(error)


def code_of(error: Exception) -> str:
    """Return the system's name of an error, such as "ENOSPC"."""
    if isinstance(error, StorageError):
        return error.code
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    return type(error).__name__
