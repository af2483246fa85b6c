"""What each command does once its settings are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.cli.build import build_task, build_trainer, evaluation_data, fit_arguments, plain_config
from drivetrain.cli.config import Settings
from drivetrain.cli.printing import print_json
from drivetrain.plan import make_plan
from drivetrain.streams import seed_host
from drivetrain.trainer import FitResult, Trainer


def print_config(settings: Settings) -> None:
    """Print the merged settings as a configuration file."""
    print(json.dumps(plain_config(settings), indent=2, default=str))


def fit(settings: Settings, as_json: bool) -> None:
    """Train, then say how it ended and which files it left."""
    trainer, task = _trainer_and_task(settings)
    train, validation = fit_arguments(settings)
    result = trainer.fit(task, train, validation, resume=settings.texts.get("resume"))
    if as_json:
        print_json(_fit_json(result))
        return
    progress = result.progress
    print(f"{result.stop_reason} after {progress.updates} updates, {progress.epoch} epochs")
    _print_table(result.metrics)
    for name, path in _files(result).items():
        if path is not None:
            print(f"{name.replace('_', ' ')}: {path}")


def evaluate(stage: str) -> Callable[[Settings, bool], None]:
    """The command that validates or tests, and prints the metrics."""

    def command(settings: Settings, as_json: bool) -> None:
        trainer, task = _trainer_and_task(settings)
        verb = trainer.validate if stage == "validation" else trainer.test
        metrics = verb(task, evaluation_data(settings, stage), checkpoint=settings.texts.get("checkpoint"))
        if as_json:
            print_json(metrics)
        else:
            _print_table(metrics)

    return command


def predict(settings: Settings, as_json: bool) -> None:
    """Predict, and print the outputs, or the files that they went to."""
    trainer, task = _trainer_and_task(settings)
    data, save_to = evaluation_data(settings, "predict"), settings.texts.get("save_to")
    outputs = trainer.predict(task, data, checkpoint=settings.texts.get("checkpoint"), save_to=save_to)
    if as_json:
        print_json({"files": [str(each) for each in outputs]} if save_to else {"batches": len(outputs)})
    elif save_to:
        print(f"{len(outputs)} files in {save_to}")
    else:
        for each in outputs:
            print(each)


def plan(settings: Settings, as_json: bool) -> None:
    """Print what a fit would do."""
    trainer, task = _trainer_and_task(settings)
    found = make_plan(trainer, task, *fit_arguments(settings))
    if as_json:
        print_json(found.to_json())
    else:
        print(found)


COMMANDS: Mapping[str, Callable[[Settings, bool], None]] = {
    "fit": fit,
    "validate": evaluate("validation"),
    "test": evaluate("test"),
    "predict": predict,
    "plan": plan,
}
"""What runs for each command, given the settings and whether to print JSON."""


def _trainer_and_task(settings: Settings) -> tuple[Trainer, Any]:
    """The task is made under the trainer's seed, so that the same command begins with the same weights."""
    trainer = build_trainer(settings)
    seed_host(trainer.seed)
    return trainer, build_task(settings)


def _files(result: FitResult) -> dict[str, str | None]:
    paths = {
        "run_dir": result.run_dir,
        "last_checkpoint": result.last_checkpoint,
        "best_checkpoint": result.best_checkpoint,
        "model_path": result.model_path,
    }
    return {name: None if path is None else str(path) for name, path in paths.items()}


def _fit_json(result: FitResult) -> dict[str, Any]:
    return {
        "stop_reason": result.stop_reason,
        "progress": result.progress.to_json(),
        "metrics": result.metrics,
        **_files(result),
    }


def _print_table(metrics: Mapping[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name.ljust(width)}  {value:.6g}")
