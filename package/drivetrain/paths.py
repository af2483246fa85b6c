"""Paths of a run as the user would write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def may_resume_by_itself(trainer: Trainer) -> bool:
    """Whether resume="auto" has a place to look in, which the next run of the program finds again."""
    return trainer.run_dir is not None or getattr(trainer.checkpoint, "directory", None) is not None


def what_goes_on(trainer: Trainer, newest: str) -> str:
    """What to say to `fit` to go on from a checkpoint, in words that end a sentence."""
    if may_resume_by_itself(trainer):
        return "resume='auto' goes on from it"
    return f"fit(..., resume={newest!r}) goes on from it, or resume='auto' once the Trainer has a run_dir"


def as_given(trainer: Trainer, path: str | None) -> str | None:
    """A path of a run as the user would write it: from the working directory, if the run directory is."""
    relative = trainer.run_dir is None or not os.path.isabs(trainer.run_dir)
    below = path is not None and os.path.isabs(path) and Path(path).is_relative_to(Path.cwd())
    return os.path.relpath(path) if path is not None and relative and below else path
