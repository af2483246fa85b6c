"""The policy of a run for files that cannot be written: `Trainer(on_save_error=...)`."""

from __future__ import annotations

import errno
import logging
import warnings
from collections import Counter
from contextlib import suppress

from drivetrain import later
from drivetrain.checkpoint.filesystem import StorageError, in_words
from drivetrain.errors import CheckpointError

_LOG = logging.getLogger(__name__)

AGAIN = "The run goes on (on_save_error='warn'), and the next time it is due it is tried again"
"""What becomes of a checkpoint."""

OVER = "The run ends with that: it is not tried again"
"""What becomes of the last checkpoint."""

LEFT_OUT = (
    "The run goes on (on_save_error='warn'), and what is logged later is written if it can be; this is not"
    " written again"
)
"""What becomes of what is logged."""


class SaveErrors:
    """The policy of one run, and what has come of it so far.

    Args:
        policy: "raise", or "warn" to go on.
        tells: Whether this process says it: one of all, as they fail together.

    Attributes:
        tolerates: Whether the run goes on.
        counts: How often each thing could not be written: "checkpoint", or a logger's class.
    """

    def __init__(self, policy: str = "raise", tells: bool = True) -> None:
        self.tolerates = policy == "warn"
        self.counts: Counter[str] = Counter()
        self._tells = tells
        self._told: set[tuple[str, str]] = set()

    def tell(
        self, what: str, lost: str, error: Exception, last_checkpoint: str | None, then: str = AGAIN
    ) -> None:
        """Count, log, and for a cause that is new warn of, something that was not written.

        Args:
            what: What it is counted as.
            lost: What is missing now, such as "the checkpoint after update 6".
            error: Why.
            last_checkpoint: The newest one that is whole, if there is one.
            then: What becomes of it.
        """
        self.counts[what] += 1
        if not self._tells:
            return
        notes = "".join(f" ({each.removeprefix('drivetrain: ')})" for each in getattr(error, "__notes__", ()))
        text = f"{lost} was not saved: {words_of(error)}{notes}. {newest(last_checkpoint)}. {then}"
        cause = what, code_of(error)
        is_new = cause not in self._told
        if not is_new or _LOG.hasHandlers():  # without any, logging would print what the warning says
            _LOG.warning(text)
        if is_new:  # the log tells of each time, a warning of each cause
            self._told.add(cause)
            warnings.warn(text, stacklevel=2)


def newest(last_checkpoint: str | None) -> str:
    """The newest checkpoint that is whole, in words."""
    if last_checkpoint is None:
        return "There is no checkpoint of this run yet"
    if is_gone(last_checkpoint):
        return f"The newest checkpoint, {last_checkpoint}, is not there any more"
    return f"The newest checkpoint is still {last_checkpoint}"


def is_gone(checkpoint: str) -> bool:
    """Whether a checkpoint is surely not there any more."""
    with suppress(CheckpointError):  # it cannot be looked at now, which says nothing of it
        return not later.DirectoryCheckpointIO().exists(checkpoint)
    return False


def words_of(error: Exception) -> str:
    """Return the text of an error; for one of the system with the file and advice."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return in_words("write", error.filename, error)[0]
    return str(error)


def code_of(error: Exception) -> str:
    """The system's name of an error, such as "ENOSPC"."""
    if isinstance(error, StorageError):
        return error.code
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    return type(error).__name__
