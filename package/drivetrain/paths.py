"""Paths of a run as the user would write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def as_given(trainer: Trainer, path: str | None) -> str | None:
    """A path of a run as the user would write it: from the working directory, if the run directory is."""
    relative = trainer.run_dir is None or not os.path.isabs(trainer.run_dir)
    below = path is not None and os.path.isabs(path) and Path(path).is_relative_to(Path.cwd())
    return os.path.relpath(path) if path is not None and relative and below else path
