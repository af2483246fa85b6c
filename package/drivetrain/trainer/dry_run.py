"""Trial runs: a Trainer's settings and data for a few batches of everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from drivetrain.core.errors import ConfigError
from drivetrain.core.int_schedule import at_start
from drivetrain.core.intervals import Every
from drivetrain.core.messages import logger
from drivetrain.data import Feed, as_source
from drivetrain.data.split_source import already_split
from drivetrain.engine.engine import Engine
from drivetrain.run.settings import RunSettings
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule

_LOG = logger(__name__)

Settings = TypeVar("Settings", bound=RunSettings)


def writes_nothing(settings: RunSettings) -> bool:
    """Return whether the settings ask for a trial that leaves no file behind."""
    return settings.dry_run not in (None, "overfit")


def as_tried(settings: Settings, verb: str) -> Settings:
    """Return the settings that a verb runs with, and tell the user what a trial leaves out.

    The settings themselves if it is no trial. A trial saves no checkpoints, and callbacks that need files are
    left out; unless it is "overfit", it runs one epoch of a few batches, and writes no logs either.
    """
    asked = settings.dry_run
    if asked is None or (asked == "overfit" and verb != "fit"):
        return settings
    changes: dict[str, Any] = {"checkpoint": False, "assets": (), "min_epochs": None, "min_steps": None}
    if asked == "overfit":
        what = f"trains and validates on {_count(settings.limit_train_batches or 1)} of the training data"
        writes = "begins afresh, and saves no checkpoints"
    else:
        batches = 1 if isinstance(asked, str) else asked
        what = f"{verb} takes {_count(batches)} of each loader"
        writes = "begins afresh, and writes nothing" if verb == "fit" else "and writes nothing"
        changes |= {f"limit_{stage}_batches": batches for stage in ("train", "validation", "test", "predict")}
        changes |= {"max_epochs": 1, "loggers": (), "run_dir": None, "validate_from": None}
        changes |= {"sanity_validation": None, "on_bad_batch": "raise"}
        if settings.validate_every is not None:
            changes["validate_every"] = Every("1 epoch")
    tried = dataclasses.replace(settings, callbacks=(), **changes)
    kept = fitting(settings.callbacks, tried, verb)
    _LOG.info(f"dry_run={asked!r}: {what}, {writes}")
    return dataclasses.replace(tried, callbacks=kept)


def fitting(callbacks: Sequence[Any], trial: RunSettings, verb: str = "fit") -> list[Any]:
    """Return the callbacks that fit the settings of a trial, and tell the user which do not."""
    kept = [each for each in callbacks if _fits(each, trial)]
    names = ", ".join(type(each).__name__ for each in callbacks if each not in kept)
    if names and verb == "fit":
        _LOG.info(f"dry_run={trial.dry_run!r} leaves out callbacks, because they need files: {names}")
    return kept


def _count(batches: float) -> str:
    if batches < 1:
        return f"a share of {batches} of the batches"
    return f"{batches} batch{'' if batches == 1 else 'es'}"


def _fits(callback: Any, settings: RunSettings) -> bool:
    """Return whether a callback that fits the Trainer fits its trial too."""
    try:
        callback.check_trainer(settings, settings.select_strategy())
    except ConfigError:
        return False
    return True


def overfitting(
    settings: RunSettings, engine: Engine, task: TaskModule, train_data: Any, validation_data: Any
) -> tuple[RunSettings, Any, Any]:
    """Return settings and data that make every epoch train and validate on the same few batches.

    They are the first of the training data in its own order, `limit_train_batches` of each process, and stay
    in memory. With named validation loaders, each name has them.
    """
    source = as_source(
        train_data,
        "training",
        settings.seed,
        batch_size=at_start(settings.batch_size),
        in_order=True,
        shard=engine.shard,
        ranks=engine.data_ranks,
        collate=settings.collate,
        task_collate=info_of(task).collate,
    )
    feed = Feed(source, engine.transfer, limit=settings.limit_train_batches or 1)
    few = already_split([each.batch for each in feed.micro_batches() if not each.is_placeholder])
    feed.close()
    unused: dict[str, Any] = {"limit_train_batches": None, "limit_validation_batches": None, "num_workers": 0}
    unused |= dict.fromkeys(("batch_size", "evaluation_batch_size", "collate", "group_by_length"))
    named = isinstance(validation_data, Mapping)
    data = dict.fromkeys(validation_data, few) if named else few
    return dataclasses.replace(settings, **unused), few, data
