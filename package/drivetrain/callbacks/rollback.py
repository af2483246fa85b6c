"""Taking a run back to its last good checkpoint, while its data go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.engine_state import like_module
from drivetrain.run_state import take_back

if TYPE_CHECKING:
    from drivetrain.run import Run


def saver_of(run: Run) -> CheckpointSaver | None:
    """What saves a run's checkpoints, if anything does."""
    return next((each for each in run.callbacks if isinstance(each, CheckpointSaver)), None)


def roll_back(run: Run) -> str | None:
    """Take a run back to its newest good checkpoint; to be called by all ranks.

    Savers ask a run's judges before they save, so that what these find bad is in no checkpoint. Everything is
    as it was saved, but for the data, which go on where they are: what was read since is passed over. This is
    saved at the end of the current update, so that a resumed run goes on from there.

    Args:
        run: The run, between two updates.

    Returns:
        The checkpoint, or None where there is none; then nothing has changed.
    """
    saver = saver_of(run)
    if saver is None:
        return None
    saver.settle(run)
    with run.timed("restore"):
        with run.engine.exchanged():
            like = like_module(run.task)
        found = saver.manager.load_latest(like)
        if found is None:
            return None
        path, snapshot = found
        take_back(run, snapshot, path)
    run.ledger.note("back")
    saver.went_back(run)
    return path
