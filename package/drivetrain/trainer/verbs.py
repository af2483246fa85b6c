"""The verbs of a Trainer as functions: each begins a run and exhausts its loop."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every, Interval
from drivetrain.core.messages import logger
from drivetrain.core.validation import flag, local_path, one_of
from drivetrain.data.resumption import Resumption
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.programs import rerun_obstacle
from drivetrain.engine.split_batch import join_batches
from drivetrain.engine.weighting import StepResult
from drivetrain.loggers.history import table_of
from drivetrain.run.ledger_report import NAME as LEDGER
from drivetrain.run.loop import evaluate, predict, train_steps
from drivetrain.run.messages import as_given, is_part, is_resumable
from drivetrain.run.preemption import Preemption
from drivetrain.run.run import Run
from drivetrain.run.session import left_with_program, run_context, what_is_left
from drivetrain.run.settings import RunSettings
from drivetrain.task.optim.given import SETTINGS_OF
from drivetrain.task.task import TaskModule
from drivetrain.trainer.assembly import build_evaluation, build_fit
from drivetrain.trainer.dry_run import as_tried
from drivetrain.trainer.observer import observed, observed_loop
from drivetrain.trainer.result import FitResult, PredictResult
from drivetrain.trainer.start import start_from

if TYPE_CHECKING:
    from drivetrain.callbacks.checkpoint import CheckpointSaver

_LOG = logger(__name__)

T = TypeVar("T")


def fit(trainer: RunSettings, *given: Any) -> FitResult:
    """Train; see `Trainer.fit`."""
    if _has_to_fork(trainer):
        return _forked(trainer, lambda: fit(trainer, *given))
    with _begin(trainer, *given) as (settings, run, saver):
        for _ in train_steps(run):
            pass
    result = _result(settings, run, saver)
    if result.history_path and result.run_dir and (result.run_dir / LEDGER).exists() and not is_part():
        _LOG.info("curves: drivetrain runs report %s", result.run_dir)
    _report_early_end(run)
    return result


def steps(trainer: RunSettings, *given: Any) -> Generator[StepResult, None, None]:
    """Train as `fit` with the same arguments, but yield after every step."""
    return left_with_program(_steps(trainer, *given))


def _steps(trainer: RunSettings, *given: Any) -> Generator[StepResult, None, None]:
    with _begin(trainer, *given, body=True) as (_, run, _):
        run.loop = train_steps(run)
        try:
            yield from observed_loop(run.loop)
        finally:
            run.loop = None
    _report_early_end(run)


@contextmanager
def _begin(
    trainer: RunSettings,
    task: TaskModule,
    train_data: Any,
    validation_data: Any,
    resume: str | None,
    settings_of: str | None,
    new_data: bool,
    skip: Interval | None,
    *,
    body: bool = False,
) -> Iterator[tuple[RunSettings, Run, CheckpointSaver | None]]:
    """Build a fit, start it from its checkpoint, and run the block, its loop, inside `run_context`.

    Yields the settings, the run, and its saver unless checkpoints are off.
    """
    _check_optimizer_settings(settings_of, resume)
    how = _resumption(new_data, skip, resume)
    trainer, resume = observed(trainer, is_fit=True, resume=resume)
    trainer, resume = as_tried(trainer, "fit"), resume if trainer.dry_run is None else None
    with Preemption(trainer.preemption) as preemption:
        trainer, run, saver, start = build_fit(trainer, task, train_data, validation_data, resume, body)
        with run_context(trainer, run):
            start_from(trainer, run, saver, start, settings_of, how)
            preemption.attach(run, partial(what_is_left, trainer, run), is_resumable(trainer))
            yield trainer, run, saver


def evaluate_on(
    trainer: RunSettings, stage: str, task: TaskModule, data: Any, checkpoint: str | None
) -> dict[str, float]:
    """Evaluate; see `Trainer.validate`."""
    if _has_to_fork(trainer):
        return _forked(trainer, lambda: evaluate_on(trainer, stage, task, data, checkpoint))
    with _begin_evaluation(trainer, stage, task, data, checkpoint) as run:
        return evaluate(run, stage, run.evaluation_feeds)


def predict_on(
    trainer: RunSettings,
    task: TaskModule,
    data: Any,
    checkpoint: str | None,
    save_to: str | os.PathLike[str] | None,
    metrics: bool,
    joined: bool,
) -> Any:
    """Predict; see `Trainer.predict`."""
    flag("predict(metrics=)", metrics)
    flag("predict(joined=)", joined)
    if save_to is not None:
        local_path("save_to", save_to)
        if joined:
            raise ConfigError(
                f"predict(joined=True, save_to={str(save_to)!r}): save_to streams one file a batch, and"
                " joined returns the outputs of all from memory. Leave one of them out"
            )
    if _has_to_fork(trainer):
        return _forked(trainer, lambda: predict_on(trainer, task, data, checkpoint, save_to, metrics, joined))
    values: dict[str, float] | None = {} if metrics else None
    sizes: list[int] = []
    # Closed at once even when writing fails: a suspended pass would leave gradients disabled for the caller.
    with (
        _begin_evaluation(trainer, "predict", task, data, checkpoint, metrics) as run,
        closing(predict(run, run.evaluation_feeds[0][1], values, sizes)) as outputs,
    ):
        found: Any = _collected(trainer, run, outputs, save_to)
    if joined:
        found = join_batches(found, sizes)
    return found if values is None else PredictResult(found, values)


def _collected(
    trainer: RunSettings, run: Run, outputs: Iterator[Any], save_to: str | os.PathLike[str] | None
) -> list[Any]:
    """Return all outputs, or write them and return the files."""
    if save_to is None:
        return list(outputs)
    if trainer.dry_run is not None:
        for _ in outputs:
            pass
        return []
    from drivetrain.checkpoint.prediction_files import write_predictions

    return write_predictions(outputs, Path(save_to), run.engine.ranks)


@contextmanager
def _begin_evaluation(
    trainer: RunSettings,
    stage: str,
    task: TaskModule,
    data: Any,
    checkpoint: str | None,
    metrics: bool = True,
) -> Iterator[Run]:
    """Build a validation, test or prediction, and run the block inside `run_context`."""
    trainer, _ = observed(trainer, is_fit=False)
    trainer = as_tried(trainer, stage)
    if trainer.dry_run is not None and str(checkpoint).partition(":")[0] in ("best", "last"):
        checkpoint = None  # the trial of a fit has saved none
    run = build_evaluation(trainer, task, data, stage, checkpoint, metrics)
    with run_context(trainer, run):
        yield run


def _has_to_fork(trainer: RunSettings) -> bool:
    """Return whether to start the other ranks as copies of this process: where the engine cannot start them
    by running the program again, as in a notebook.
    """
    if (
        trainer.select_strategy().world_size == 1
        or trainer.num_nodes > 1
        or torch.distributed.is_initialized()
    ):
        return False
    return detect(os.environ) is None and rerun_obstacle() is not None


def _forked(trainer: RunSettings, act: Callable[[], T]) -> T:
    """Run a function as every rank, in copies of this process, and remove their traces afterwards."""
    from drivetrain.distributed.launch.forks import fork_ranks

    gc.collect()  # the copies must not inherit remains of an earlier run's process group
    return fork_ranks(act, trainer.select_strategy().world_size)


def _result(settings: RunSettings, run: Run, saver: CheckpointSaver | None) -> FitResult:
    """Return what a fit returns, its paths as the user would write them."""
    assert run.stop_reason is not None
    shown = partial(as_given, settings)
    directory = run.run_dir if run.run_dir is not None and run.run_dir.exists() else None
    table = table_of(settings.loggers, run.run_dir) if run.metrics else None
    best: dict[str, str] = {}
    if saver is not None:
        best = {by: shown(path) or path for by, path in saver.best_checkpoints().items()}
    return FitResult(
        dict(run.metrics),
        run.progress,
        run.stop_reason,
        None if directory is None else Path(shown(str(directory)) or directory),
        shown(run.last_checkpoint),
        next(iter(best.values()), None),
        shown(saver.weights) if saver and run.nonfinite.diverged is None else None,
        None if table is None else shown(str(table)),
        best,
        saver.best_value() if saver else None,
    )


def _report_early_end(run: Run) -> None:
    """Log why a fit has ended before its planned length, if it has."""
    length, reason = run.length, run.stop_reason or ""
    planned = ["max_steps=", "max_epochs=", "max_tokens="]
    if length.max_steps is None and length.max_epochs is None and length.max_tokens is None:
        planned.append("max_time=")
    if not reason.startswith(tuple(planned)) and not is_part():
        of = "" if length.steps is None else f" of {length.steps}"
        _LOG.info(f"the fit ended early, after step {run.progress.steps}{of}: {reason}")


def _resumption(new_data: bool, skip: Interval | None, resume: object) -> Resumption:
    flag("fit(new_data=)", new_data)
    how = Resumption(new_data, None if skip is None else Every(skip))
    if how.asked and resume is None:
        raise ConfigError(f"{how.asked} is for a resume: give resume='auto' or a path, or leave it out")
    return how


def _check_optimizer_settings(given: object, resume: object) -> None:
    if given is None:
        return
    one_of("optimizer_settings", given, SETTINGS_OF)
    if resume is None:
        raise ConfigError(f"optimizer_settings={given!r} is for a resume: give resume='auto' or leave it out")
