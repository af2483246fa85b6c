"""Trials of Ray Tune that are fits."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.core.errors import ConfigError, MissingDependencyError
from drivetrain.core.random_streams import preserved, seed_host
from drivetrain.core.registry import is_installed
from drivetrain.integrations.ray.report import RayReport
from drivetrain.run.messages import part_of
from drivetrain.task.task import TaskModule
from drivetrain.trainer.trainer import Trainer


def trainable(
    make_task: Callable[[dict[str, Any]], Any],
    data: Any,
    *,
    trainer: Trainer,
    metric: str = "validation/loss",
) -> Callable[[dict[str, Any]], None]:
    """Return a function for `ray.tune.Tuner`; each trial is a fit.

    A trial reports its values with a checkpoint whenever the metric has a new one. A trial that Ray starts
    from a checkpoint, its own or another trial's, resumes from it, with the optimizer settings of the trial's
    own configuration.

    Args:
        make_task: Takes the configuration of a trial, and returns a task; or a pair of a task and a mapping
            of the Trainer's arguments that differ in this trial, as for `drivetrain.search`.
        data: As for `Trainer.fit`, or a pair of training and validation data.
        trainer: The Trainer of each trial, in one process. Each fit has a directory inside its trial's
            directory.
        metric: The logged name to report by, which the scheduler and `TuneConfig(metric=)` may use.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: The Trainer saves no checkpoints, has a run_dir, or trains in several processes.
    """
    if not is_installed("ray"):
        raise MissingDependencyError("ray", "ray", "drivetrain.integrations.ray.trainable")
    if trainer.run_dir is not None:
        raise ConfigError(
            "trainable(trainer=) has a run_dir, and Ray gives each trial a directory. Leave it out"
        )
    if trainer.select_strategy().world_size > 1:
        raise ConfigError(
            "a trial of trainable() trains in one process: give the Trainer devices=1. For several, call a"
            " fit with the callback RayReport inside Ray Train's TorchTrainer"
        )
    dataclasses.replace(trainer, callbacks=(*trainer.callbacks, RayReport(metric)))  # checks that it saves

    def fit(config: dict[str, Any]) -> None:
        from ray import tune

        with preserved():
            seed_host(trainer.seed)
            made = make_task(dict(config))
        task, changes = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not isinstance(task, TaskModule) or not isinstance(changes, Mapping):
            raise ConfigError(
                "make_task must return a TaskModule, or a TaskModule and a mapping of arguments of the"
                f" Trainer, not {made!r}"
            )
        own = dataclasses.replace(trainer, **changes)
        # A trial that goes on has another trial's checkpoint. Ray's threads take no signals.
        own = dataclasses.replace(
            own,
            callbacks=(*own.callbacks, RayReport(metric)),
            run_dir=tempfile.mkdtemp(prefix="fit-", dir=tune.get_context().get_trial_dir()),
            preemption=False,
            hang_timeout=None,  # Ray holds a trial in its report while others run
        )
        train, validation = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        checkpoint = tune.get_checkpoint()
        with part_of("Ray's Tuner.restore goes on from the last one that was reported"):
            if checkpoint is None:
                own.fit(task, train, validation)
                return
            with checkpoint.as_directory() as directory:
                own.fit(task, train, validation, resume=directory, optimizer_settings="program")

    return fit
