"""The policy of a run for files that cannot be written: `Trainer(on_save_error=...)`."""

from __future__ import annotations

from contextlib import suppress

from drivetrain.checkpoint.storage.filesystem import in_words
from drivetrain.core.errors import CheckpointError
from drivetrain.core.messages import logger

_LOG = logger(__name__)

AGAIN = "The run goes on (on_save_error='warn'), and the next save that is due tries again"
"""The consequence for a checkpoint."""

LEFT_OUT = (
    "The run goes on (on_save_error='warn'). Later values are written if that is possible; these values are"
    " lost"
)
"""The consequence for logged values."""


class SaveErrors:
    """The policy of one run.

    Args:
        policy: "raise", or "warn" to go on.
        reports: Whether this rank reports errors: only one does, because all fail together.

    Attributes:
        tolerates: Whether the run goes on.
    """

    def __init__(self, policy: str = "raise", reports: bool = True) -> None:
        self.tolerates = policy == "warn"
        self._reports = reports
        self._warned: set[tuple[str, str | int]] = set()

    def report(self, lost: str, error: Exception, last_checkpoint: str | None, then: str = AGAIN) -> None:
        """Warn of a failure, of each cause once; what was lost ends with the number of its step."""
        cause = lost.rpartition(" ")[0], getattr(error, "code", getattr(error, "errno", ""))
        if self._reports and cause not in self._warned:
            self._warned.add(cause)
            notes = getattr(error, "__notes__", ())
            notes = "".join(f" ({each.removeprefix('drivetrain: ')})" for each in notes)
            _LOG.warning(f"{lost} was not saved: {words_of(error)}{notes}. {newest(last_checkpoint)}. {then}")


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
