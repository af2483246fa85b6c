"""Paths of a run as the user would write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.run.settings import RunSettings

_GOES_ON: ContextVar[str | None] = ContextVar("goes_on", default=None)
_IS_PROBE: ContextVar[bool] = ContextVar("is_probe", default=False)


@contextmanager
def part_of(goes_on: str, is_probe: bool = False) -> Iterator[None]:
    """Run the block, whose fits are parts of something larger, such as a search.

    Args:
        goes_on: Says in their last words how the user goes on from a checkpoint.
        is_probe: Whether they follow no logged values, and the task's own callbacks play no part.
    """
    before, was_probe = _GOES_ON.set(goes_on), _IS_PROBE.set(is_probe)
    try:
        yield
    finally:
        _GOES_ON.reset(before)
        _IS_PROBE.reset(was_probe)


def is_part() -> bool:
    """Return whether a fit is a part of something larger."""
    return _GOES_ON.get() is not None


def is_probe() -> bool:
    """Return whether a fit is a short one for our own purposes, such as a finder's."""
    return _IS_PROBE.get()


def may_resume_by_itself(settings: RunSettings) -> bool:
    """Return whether resume="auto" works: the next run of the program finds the same directory."""
    policies = chosen_policies(settings.checkpoint)
    return settings.run_dir is not None or any(each.directory is not None for each in policies)


def is_resumable(settings: RunSettings) -> bool:
    """Return whether a run can go on from the checkpoints that these settings save."""
    return all(each.resumable for each in chosen_policies(settings.checkpoint))


def what_goes_on(settings: RunSettings, newest: str) -> str:
    """Return the argument of `fit` that resumes from a checkpoint, as the end of a sentence."""
    if not is_resumable(settings):
        return "it holds weights alone, and no run can go on from it"
    if (larger := _GOES_ON.get()) is not None:
        return larger
    if may_resume_by_itself(settings):
        return "resume='auto' goes on from it"
    return f"fit(..., resume={newest!r}) goes on from it, or resume='auto' once the Trainer has a run_dir"


def as_given(settings: RunSettings, path: str | None) -> str | None:
    """Return a path of a run, relative to the working directory if the run directory is."""
    relative = settings.run_dir is None or not os.path.isabs(settings.run_dir)
    below = path is not None and os.path.isabs(path) and Path(path).is_relative_to(Path.cwd())
    return os.path.relpath(path) if path is not None and relative and below else path
