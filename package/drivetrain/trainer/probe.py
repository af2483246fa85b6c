"""Fits for our own purposes: short ones, of a copy of the task, that write nothing and follow no values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from drivetrain.callbacks import Callback, EarlyStopping
from drivetrain.core.errors import ConfigError
from drivetrain.run.messages import part_of
from drivetrain.run.settings import RunSettings
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.torch_schedule import TorchSchedule
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
        ("max_epochs", "max_time", "min_epochs", "min_steps", "dry_run", "validate_every", "validate_from")
    )
    nothing |= {"run_dir": None, "sanity_validation": None, "checkpoint": False, "assets": (), "loggers": ()}
    nothing |= {"progress_bar": False, "train_metrics": False, "log_first_step": False, "log_every": 1}
    with without_trace(task, data), part_of("the finder begins anew"):
        copied = unwatched(_copied(task), _Probed)
        fit(dataclasses.replace(settings, **{**nothing, "on_nonfinite": "stop", **changes}), copied, data)


def _copied(task: object) -> TaskModule:
    checked = check_task(task)
    try:
        return copy.deepcopy(checked)
    except Exception as error:
        raise ConfigError(
            f"{type(task).__name__} cannot be copied, and a finder trains a copy: {error}. Keep what cannot"
            " be copied, such as an open file or a tensor that is no leaf, out of its attributes"
        ) from error


class _Unwatched(TaskModule):
    """Overrides of a task whose fits follow no logged values."""

    def configure_callbacks(self, stage: str) -> Sequence[Any]:
        """Leave out early stopping."""
        return without_stopping(super().configure_callbacks(stage))

    def configure_optimizers(self) -> Any:
        """Leave out schedules by a value."""
        return _without_watching(super().configure_optimizers())


class _Probed(_Unwatched):
    """Overrides of a task that is probed."""

    def configure_callbacks(self, stage: str) -> Sequence[Any]:
        """Keep only the callbacks that change the task before its optimizers are built."""
        callbacks = super().configure_callbacks(stage)
        return [each for each in callbacks if type(each).modify_task is not Callback.modify_task]


def unwatched(task: TaskModule, overrides: type[_Unwatched] = _Unwatched) -> TaskModule:
    """Change a task so that its fits need no logged values: no early stopping, no schedule by one."""
    kind = type(task)
    task.__class__ = type(kind.__name__, (overrides, kind), {"__module__": kind.__module__})
    return task


def without_stopping(callbacks: Any) -> tuple[Any, ...]:
    """Return the callbacks but `EarlyStopping`."""
    return tuple(each for each in callbacks if not isinstance(each, EarlyStopping))


def _without_watching(configured: Any) -> Any:
    """Return what `configure_optimizers` gave, without schedules that follow a value."""
    if isinstance(configured, Mapping):
        return {name: _without_watching(each) for name, each in configured.items()}
    if isinstance(configured, OptimizerConfig) and configured.schedule == "reduce_on_plateau":
        configured = copy.copy(configured)
        object.__setattr__(configured, "schedule", "constant")  # the class is frozen
        object.__setattr__(configured, "schedule_options", {})
    if isinstance(configured, (OptimizerConfig, type)) or not callable(configured):
        return configured

    def make(*given: Any) -> Any:
        made = configured(*given)
        if isinstance(made, tuple) and isinstance(made[1], TorchSchedule) and made[1].metric is not None:
            return made[0]
        return made

    return make
