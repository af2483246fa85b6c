"""The commands that make a task, such as `fit` and `plan`: functions of the settings and of whether to print
JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from drivetrain.callbacks.summary import summarize
from drivetrain.cli.printing import print_json, table
from drivetrain.cli.settings import PLAN_RATES, Settings
from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import seed_host
from drivetrain.core.validation import count, number
from drivetrain.data import batch_size
from drivetrain.trainer.plan.plan import make_plan
from drivetrain.trainer.result import FitResult
from drivetrain.trainer.trainer import Trainer

_LOG = logger(__name__)


def fit(settings: Settings, as_json: bool) -> None:
    """Train, then print how the fit ended and which files it left."""
    trainer, task = _trainer_and_task(settings)
    result = trainer.fit(
        task,
        *fit_data(settings),
        resume=settings.option("resume"),
        optimizer_settings=settings.option("optimizer_settings"),
        new_data=bool(settings.option("new_data")),
        skip=settings.option("skip"),
    )
    if as_json:
        print_json(_fit_json(result))
        return
    progress = result.progress
    print(f"{result.stop_reason} after {progress.steps} steps, {progress.epoch} epochs")
    _print_table(result.metrics)
    for name, path in _files(result).items():
        if path is not None:
            print(f"{name.replace('_', ' ')}: {path}")
    if len(result.best_checkpoints) > 1:
        for by, best in result.best_checkpoints.items():
            print(f"best checkpoint by {by}: {best}")


def evaluate(stage: str, settings: Settings, as_json: bool) -> None:
    """Validate or test, and print the metrics."""
    trainer, task = _trainer_and_task(settings)
    verb = trainer.validate if stage == "validation" else trainer.test
    metrics = verb(task, _evaluation_data(settings, stage), checkpoint=settings.option("checkpoint"))
    if as_json:
        print_json(metrics)
    else:
        _print_table(metrics)


def predict(settings: Settings, as_json: bool) -> None:
    """Predict; print the outputs or the number of files written, and the metrics if they are asked for."""
    trainer, task = _trainer_and_task(settings)
    data, save_to = _evaluation_data(settings, "predict"), settings.option("save_to")
    metrics, joined = bool(settings.option("metrics")), bool(settings.option("joined"))
    found = trainer.predict(
        task, data, checkpoint=settings.option("checkpoint"), save_to=save_to, metrics=metrics, joined=joined
    )
    outputs = found.outputs if metrics else found
    if as_json:
        made: dict[str, Any]
        if save_to:
            made = {"files": [str(each) for each in outputs]}
        else:
            made = {"samples": batch_size(outputs)} if joined else {"batches": len(outputs)}
        print_json({**made, "metrics": found.metrics} if metrics else made)
        return
    if save_to:
        print(f"{len(outputs)} files in {save_to}")
    else:
        for each in [outputs] if joined else outputs:
            print(each)
    if metrics:
        _print_table(found.metrics)


def plan(settings: Settings, as_json: bool) -> None:
    """Print the plan of a fit, what it takes at the given rates, and the collectives of a step."""
    trainer, task = _trainer_and_task(settings, without_values=True)
    size = _number(settings, "world_size")
    if size is not None:
        trainer = _on_processes(trainer, size)
    with redirect_stdout(sys.stderr):  # for what the task prints in its step
        found = make_plan(trainer, task, *fit_data(settings))
    rates = {name: rate for name in PLAN_RATES if (rate := _number(settings, name)) is not None}
    disk = rates.pop("disk_bytes_per_second", None)
    times = {"hours": found.hours(**rates)} if rates else {}
    if disk is not None:
        times["seconds_of_a_save"] = None if found.checkpoint is None else found.checkpoint / disk
    if as_json:
        print_json(found.to_json() | times)
        return
    print(found)
    for name, value in times.items():
        print(f"{name.replace('_', ' ')}: {'unknown' if value is None else f'{value:.4g}'}")
    if settings.option("run"):
        unknown = "not known" if found.collectives is None else "none"
        print(found.listed() or f"collectives in a step of {found.processes} process(es): {unknown}")


def _on_processes(trainer: Trainer, size: float) -> Trainer:
    """Return a trainer of as many processes, on machines of `devices` each, or on one if that is "auto"."""
    local = trainer.devices if isinstance(trainer.devices, int) else size
    if size % local:
        raise ConfigError(
            f"--world-size {size:g} is no multiple of --trainer.devices {local}, the processes of a machine"
        )
    return replace(trainer, devices=int(local), num_nodes=int(size // local))


def _number(settings: Settings, name: str) -> float | None:
    """Return an option's number; None if it is not given."""
    text, option = settings.option(name), f"--{name.replace('_', '-')}"
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{option} must be a number, such as 1024 or 4e14, not {text!r}") from None
    if name == "world_size":
        return count(option, int(value) if value.is_integer() else value, at_least=1)
    return number(option, value, above=0)


def summary(settings: Settings, as_json: bool) -> None:
    """Print the summary of a task."""
    _, task = _trainer_and_task(settings, without_values=True)
    depth = settings.option("depth") or "1"
    if not depth.isdecimal():
        raise ConfigError(f"--depth must be a whole number, at least 0, not {depth!r}")
    _show(summarize(task, int(depth)), as_json)


def _show(found: Any, as_json: bool) -> None:
    if as_json:
        print_json(found.to_json())
    else:
        print(found)


validate = partial(evaluate, "validation")
test = partial(evaluate, "test")


def _trainer_and_task(settings: Settings, without_values: bool = False) -> tuple[Trainer, Any]:
    """Make both, the task under the trainer's seed: the same command begins with the same weights.

    Args:
        without_values: Whether the weights may be on the meta device, which takes neither memory nor time.
    """
    trainer = settings.trainer()
    check_task_given(settings)
    seed_host(trainer.seed)
    if without_values:
        try:
            with torch.device("meta"):
                return trainer, settings.make("task")
        except Exception as error:  # of a constructor that reads values; a fault of its own is raised below
            _LOG.info("the task is made with its weights: it cannot be made on the meta device (%s)", error)
        seed_host(trainer.seed)
    return trainer, settings.make("task")


def check_task_given(settings: Settings) -> None:
    """Check that the settings name a task."""
    if settings.option("task") is None:
        raise ConfigError("which task? Give --task module.Class or --task path/to/file.py:Class")


def fit_data(settings: Settings) -> tuple[Any, Any]:
    """Return the training data and the validation data."""
    return settings.make(_training_option(settings)), settings.make("validation_data")


def _training_option(settings: Settings) -> str:
    """Return the name of the option that gives the training data."""
    given = [name for name in ("data", "train_data") if settings.option(name) is not None]
    if len(given) > 1:
        raise ConfigError("--data and --train-data both give training data; give one of them")
    if not given:
        raise ConfigError(
            "no training data: give --data module.object (with train_data() and so on) or --train-data"
        )
    return given[0]


def _evaluation_data(settings: Settings, stage: str) -> Any:
    data = settings.make("data")
    other = settings.make("validation_data") if stage == "validation" else None
    if data is not None and other is not None:
        raise ConfigError("--data and --validation-data both give validation data; give one of them")
    if data is None and other is None:
        raise ConfigError(f"no {stage} data: give --data module.object, with {stage}_data() or batches")
    return data if other is None else other


def _files(result: FitResult) -> dict[str, str | None]:
    names = ("run_dir", "last_checkpoint", "best_checkpoint", "model_path")
    paths = {name: getattr(result, name) for name in names}
    return {name: None if path is None else str(path) for name, path in paths.items()}


def _fit_json(result: FitResult) -> dict[str, Any]:
    return {
        "stop_reason": result.stop_reason,
        "progress": result.progress.to_json(),
        "metrics": result.metrics,
        **_files(result),
        "best_checkpoints": result.best_checkpoints,
        "best_value": result.best_value,
    }


def _print_table(metrics: Mapping[str, float]) -> None:
    table((), [(name, f"{value:.6g}") for name, value in metrics.items()])
