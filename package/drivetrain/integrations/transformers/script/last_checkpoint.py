"""The checkpoint that a script resumes from."""

from __future__ import annotations

import os
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint as _their_last

from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.integrations.transformers.script.checkpoint_folders import newest


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest good checkpoint in an `output_dir`, for `train(resume_from_checkpoint=...)`.

    The function of the same name in `transformers.trainer_utils` returns the folder with the largest number,
    even if it is damaged.

    Args:
        folder: The folder; it may be missing.

    Returns:
        The path of its folder `checkpoint-N`; None if there is none. A checkpoint of transformers' own
        Trainer is returned only if there is no other, and `train` says why it cannot be resumed.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
    """
    try:
        return newest(folder)[0]
    except DamagedCheckpointError:
        raise
    except CheckpointError:
        theirs: str | None = _their_last(folder) if Path(folder).is_dir() else None
        return theirs
