"""The checkpoint that a script resumes from."""

from __future__ import annotations

import os
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint as _their_last

from drivetrain.checkpoint.locate import resolve
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest good checkpoint in an `output_dir`, for `train(resume_from_checkpoint=...)`.

    It replaces the function of this name in `transformers.trainer_utils`, which finds no checkpoint of ours.

    Args:
        folder: The folder; it may be missing.

    Returns:
        Its path; None if there is none. A checkpoint of transformers' own Trainer is returned only if there
        is no other, and `train` says why it cannot be resumed.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
    """
    try:
        return resolve(folder)
    except DamagedCheckpointError:
        raise
    except CheckpointError:
        theirs: str | None = _their_last(folder) if Path(folder).is_dir() else None
        return theirs
