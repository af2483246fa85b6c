"""Trial runs: a Trainer's settings and data for a few batches of everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.messages import logger
from drivetrain.run.settings import RunSettings

_LOG = logger(__name__)

Settings = TypeVar("Settings", bound=RunSettings)


def as_tried(settings: Settings, verb: str) -> Settings:
    """Return the settings that a verb runs with, and tell the user what a trial leaves out.

    The settings themselves if it is no trial. A trial saves no checkpoints, and callbacks that need files are
    left out; it runs one epoch of a few batches, and writes no logs either.
    """
    asked = settings.dry_run
    if asked is None:
        return settings
    batches = 1 if isinstance(asked, str) else asked
    changes: dict[str, Any] = {"checkpoint": False, "assets": (), "min_steps": None}
    changes |= {f"limit_{stage}_batches": batches for stage in ("train", "validation", "test", "predict")}
    changes |= {"max_epochs": 1, "loggers": (), "run_dir": None, "validate_from": None}
    changes |= {"sanity_validation": None, "on_bad_batch": "raise"}
    if settings.validate_every is not None:
        changes["validate_every"] = Every("1 epoch")
    tried = dataclasses.replace(settings, callbacks=(), **changes)
    kept = fitting(settings.callbacks, tried, verb)
    begins = "begins afresh, and" if verb == "fit" else "and"
    of = "batch" if batches == 1 else "batches"
    _LOG.info(f"dry_run={asked!r}: {verb} takes {batches} {of} of each loader, {begins} writes nothing")
    return dataclasses.replace(tried, callbacks=kept)


def fitting(callbacks: Sequence[Any], trial: RunSettings, verb: str = "fit") -> list[Any]:
    """Return the callbacks that fit the settings of a trial, and tell the user which do not."""
    kept = [each for each in callbacks if _fits(each, trial)]
    names = ", ".join(type(each).__name__ for each in callbacks if each not in kept)
    if names and verb == "fit":
        _LOG.info(f"dry_run={trial.dry_run!r} leaves out callbacks, because they need files: {names}")
    return kept


def _fits(callback: Any, settings: RunSettings) -> bool:
    """Return whether a callback that fits the Trainer fits its trial too."""
    try:
        callback.check_trainer(settings, settings.select_strategy())
    except ConfigError:
        return False
    return True
