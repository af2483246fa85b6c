"""Fits for our own purposes: short ones, of a copy of the task, that write nothing and follow no values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from drivetrain.run.messages import part_of
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule
from drivetrain.task.without_trace import without_trace
from drivetrain.trainer.assembly import check_task

Settings = TypeVar("Settings", bound=RunSettings)

Fit = Callable[[Settings, TaskModule, Any], object]


def probe(settings: Settings, task: TaskModule, data: Any, fit: Fit[Settings], **changes: Any) -> None:
    """Fit a copy of a task, without a trace.

    Args:
        settings: A Trainer; its callbacks, its length and what it writes and validates play no part.
        **changes: Arguments of the Trainer that makes the fit.
    """
    nothing: dict[str, Any] = dict.fromkeys(
        ("max_epochs", "max_time", "max_tokens", "min_steps", "dry_run", "validate_every", "validate_from")
    )
    nothing |= {"run_dir": None, "sanity_validation": None, "checkpoint": False, "assets": (), "loggers": ()}
    nothing |= {"progress_bar": False, "train_metrics": False, "log_first_step": False, "log_every": 1}
    with without_trace(task, data), part_of("the finder begins anew", is_probe=True):
        fit(
            dataclasses.replace(settings, **{**nothing, "on_nonfinite": "stop", **changes}),
            copy.deepcopy(check_task(task)),
            data,
        )
