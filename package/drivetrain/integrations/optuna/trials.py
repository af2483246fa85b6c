"""One trial of a search: a fit, what it reports to the study, and how it ended."""

from __future__ import annotations

import dataclasses
import math
import os
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.monitored_metric import MonitoredMetric
from drivetrain.core.errors import ConfigError, NonFiniteError
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import clear_frames, free_caches
from drivetrain.core.random_streams import preserved, seed_host
from drivetrain.core.validation import check_names
from drivetrain.distributed.failure.messages import shortened
from drivetrain.distributed.ranks import Ranks
from drivetrain.integrations.optuna.result import SearchMistake
from drivetrain.integrations.optuna.space import Parameters, Space
from drivetrain.integrations.optuna.study import FAILURE, Claim, claim_trial, fail, id_of, trial_directory
from drivetrain.task.task import TaskModule
from drivetrain.trainer.result import FitResult
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_LOG = logger(__name__)

_ALIKE = 3
"""The number of trials at the start that may fail with one error before it ends the search."""


@dataclass(frozen=True)
class SearchSettings:
    """The arguments of a search.

    Attributes:
        make_task: Returns the task for the parameters, or the task and changes of the Trainer.
        data: As for `fit`; a pair of training and validation data; or a function of the parameters.
        space: The space.
        trainer: The Trainer of all trials.
        objectives: The logged names to optimise.
        trials: The number of trials.
        directory: The directory of the search.
        prunes: Whether there is a pruner.
        finished: The numbers of the trials that had ended when the program started.
        trained: The tasks and parameters that this process has trained, by their ids.
    """

    make_task: Callable[[Parameters], Any]
    data: Any
    space: Space
    trainer: Trainer
    objectives: tuple[str, ...]
    trials: int
    directory: Path
    prunes: bool
    finished: frozenset[int] = frozenset()
    trained: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    def task_and_trainer(self, parameters: Parameters, number: int) -> tuple[TaskModule, Trainer]:
        """Return the task and the Trainer of a trial. The task's weights are a function of the seed.

        Raises:
            SearchMistake: `make_task` returned something else, or names that the Trainer does not have.
            ConfigError: The Trainer does not take the changes.
        """
        with preserved():
            seed_host(self.trainer.seed)
            made = self.make_task(dict(parameters))
        task, changes = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not isinstance(task, TaskModule) or not isinstance(changes, Mapping):
            raise SearchMistake(
                "make_task must return a TaskModule, or a TaskModule and a mapping of arguments of the"
                f" Trainer such as {{'batch_size': 64}}; not {made!r}"
            )
        if "run_dir" in changes:
            raise SearchMistake(
                "make_task returned run_dir, and the search gives each trial a directory itself"
            )
        try:
            check_names("Trainer", changes, {each.name for each in fields(Trainer)}, "argument")
        except ConfigError as error:
            raise SearchMistake(
                f"make_task returned an argument that the Trainer does not take: {error}"
            ) from None
        own = trial_directory(self.directory, number)
        return task, dataclasses.replace(self.trainer, **changes, run_dir=own)

    def data_of(self, parameters: Parameters) -> tuple[Any, Any]:
        """Return the training data and the validation data of a trial."""
        data = self.data(dict(parameters)) if callable(self.data) else self.data
        return data if isinstance(data, tuple) and len(data) == 2 else (data, None)

    def fit(self, number: int, parameters: Parameters, resume: bool, report: TrialReport) -> FitResult:
        """Train a trial's task, on the rank that this is."""
        task, trainer = self.task_and_trainer(parameters, number)
        self._check_untrained(task)
        # An error that is raised would end the ranks that a launcher has started, and with them the search.
        ends = "stop" if trainer.on_nonfinite == "raise" else trainer.on_nonfinite
        trainer = dataclasses.replace(trainer, callbacks=(*trainer.callbacks, report), on_nonfinite=ends)
        return trainer.fit(task, *self.data_of(parameters), resume="auto" if resume else None)

    def _check_untrained(self, task: TaskModule) -> None:
        """Check that no earlier trial has trained the task or its weights, which this trial would go on from.

        Raises:
            SearchMistake: One has.
        """
        parts = [task, *(each for each in task.parameters() if each.requires_grad)]
        if any((seen := self.trained.get(id(each))) is not None and seen() is each for each in parts):
            raise SearchMistake(
                "make_task returned a task or a model that an earlier trial has trained, so this trial would"
                " go on from its weights. Make the task and its model anew in make_task, or copy the model"
                " there by copy.deepcopy"
            )
        self.trained.update((id(each), weakref.ref(each)) for each in parts)


class TrialReport(Callback):
    """Reports the objective to the study at each of its values, and stops a fit that the pruner gives up.

    All ranks decide together: rank 0 asks the pruner, and all stop after the same step.

    Args:
        objectives: The names.
        judge: Reports a value with its `_step_of_pruners`, or None for a value that was reported already, and
            returns whether to prune. None on ranks that have no study, and without a pruner.
        prunes: Whether there is a pruner.
    """

    def __init__(
        self, objectives: tuple[str, ...], judge: Callable[[float | None, int], bool] | None, prunes: bool
    ) -> None:
        self._monitored = [MonitoredMetric(each, "the search optimises") for each in objectives]
        self._judge = judge
        self._prunes = prunes
        self.mistake: Exception | None = None
        self.nonfinite: NonFiniteError | None = None
        self.pruned = False

    def on_fit_start(self, run: Run) -> None:
        """Check that the fit can give the objectives, and prune a resumed trial that was to be pruned."""
        try:
            for each in self._monitored:
                each.begin(run)
        except ConfigError as error:
            self.mistake = error
            raise
        if self._prunes and run.last_checkpoint is not None:
            self._decide(run, None)

    def on_log(self, run: Run) -> None:
        """Report the objective if this log point has it."""
        before = run.failure
        for each in self._monitored:
            if each.has_new_value(run) and self._prunes:
                self._decide(run, run.metrics[each.name])
        self.mistake = self.mistake if run.failure is before else run.failure

    def on_fit_end(self, run: Run) -> None:
        """Check that the objectives have come, unless a NaN or an infinity has ended the fit."""
        self.nonfinite = run.nonfinite.diverged
        if self.nonfinite is not None:
            return
        before = run.failure
        for each in self._monitored:
            each.end(run)
        self.mistake = self.mistake if run.failure is before else run.failure

    def _decide(self, run: Run, value: float | None) -> None:
        judge, step = self._judge, _step_of_pruners(run)
        if run.engine.ranks.first(lambda: judge is not None and judge(value, step)):
            self.pruned = True
            run.stop(f"pruned after step {run.progress.steps}")


def _step_of_pruners(run: Run) -> int:
    """Return thousandths of an epoch, or samples where its length is unknown: trials differ in batch size."""
    progress, per_epoch = run.progress, run.length.steps_per_epoch
    if per_epoch is None:
        return progress.samples
    return 1000 * (progress.steps + progress.skipped) // per_epoch


def run_trial(
    settings: SearchSettings,
    study: optuna.Study | None,
    storage: BaseStorage | None,
    ranks: Ranks,
    fit: Callable[[Callable[[], FitResult]], FitResult] = lambda act: act(),
) -> bool:
    """Run the next trial, on all ranks; return whether there was one.

    An error of the trial is recorded. If only some ranks raised it, it ends the processes, and is raised.

    Args:
        settings: The search.
        study: The study; None on all ranks but the first.
        storage: Its storage.
        ranks: The ranks that a launcher has started.
        fit: Calls the function that it is given, which trains, on the ranks of the trial.

    Raises:
        SearchMistake: No trial can work.
    """
    claim: Claim | None = None

    def begin() -> tuple[int, Parameters, bool] | None:
        nonlocal claim
        claim = claim_trial(study, storage, settings.directory, settings.trials)
        if claim is None:
            return None
        return claim.trial.number, settings.space.suggest(claim.trial), claim.has_begun

    try:
        begun = ranks.first(begin)
        if begun is None:
            return False
        number, parameters, has_begun = begun
        judge = None if claim is None else _judge(claim.trial, storage)
        report = TrialReport(settings.objectives, judge, settings.prunes)
        resume = has_begun and settings.trainer.checkpoint is not False
        try:
            result = fit(lambda: settings.fit(number, parameters, resume, report))
        except Exception as error:
            if isinstance(error, SearchMistake) or error is report.mistake:
                raise SearchMistake(str(error)) from error
            reason = reason_of(error)
            if claim is not None and ranks.size == 1 and _is_of_all(settings, study, reason):
                raise SearchMistake(
                    f"the first trials all failed with the same error, up to trial {number}: {reason}."
                    f" Correct the program and start it again: the search goes on with trial {number}"
                ) from error
            if claim is not None:
                fail(study, storage, number, reason)
            if ranks.size > 1:
                raise  # the others may wait for this rank in a collective
            clear_frames(error)
        else:
            if claim is not None:
                if report.nonfinite is None:
                    _finish(settings, study, storage, claim.trial, result, report.pruned)
                else:
                    fail(study, storage, number, reason_of(report.nonfinite))
        free_caches()
        return True
    finally:
        if claim is not None:
            claim.lock.release()


def _is_of_all(settings: SearchSettings, study: optuna.Study, reason: str) -> bool:
    """Return whether all trials since the start have failed for one reason, and are enough to blame it."""
    ended = [
        each
        for each in study.get_trials(deepcopy=False)
        if each.state.is_finished() and each.number not in settings.finished
    ]
    enough = len(ended) + 1 >= max(2, min(_ALIKE, settings.trials))
    return enough and all(each.user_attrs.get(FAILURE) == reason for each in ended)


def _judge(trial: optuna.Trial, storage: BaseStorage) -> Callable[[float | None, int], bool]:
    number = id_of(trial.study, storage, trial.number)

    def judge(value: float | None, step: int) -> bool:
        reported = storage.get_trial(number).intermediate_values
        if value is not None and step not in reported:
            trial.report(value, step)
        return (value is not None or max(reported, default=-1) == step) and trial.should_prune()

    return judge


def _finish(
    settings: SearchSettings,
    study: optuna.Study,
    storage: BaseStorage,
    trial: optuna.Trial,
    result: FitResult,
    pruned: bool,
) -> None:
    trial.set_user_attr("stop_reason", result.stop_reason)
    trial.set_user_attr("steps", result.progress.steps)
    for name in ("model_path", "last_checkpoint", "best_checkpoint"):
        path = getattr(result, name)
        trial.set_user_attr(name, None if path is None else os.path.relpath(path, settings.directory))
    values = [result.metrics[each] for each in settings.objectives]
    odd = [each for each, value in zip(settings.objectives, values, strict=True) if not math.isfinite(value)]
    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
        _LOG.info(f"trial {trial.number} {result.stop_reason}: {_shown(trial.params)}")
    elif odd:
        fail(study, storage, trial.number, f"{odd[0]} is {result.metrics[odd[0]]}")
    else:
        study.tell(trial, values)
        found = zip(settings.objectives, values, strict=True)
        told = ", ".join(f"{name} {value:.6g}" for name, value in found)
        _LOG.info(f"trial {trial.number}: {told}, with {_shown(trial.params)}")


def _shown(parameters: Parameters) -> str:
    return ", ".join(f"{name}={each!r}" for name, each in parameters.items())


def reason_of(error: BaseException) -> str:
    """Return an error as one text, with the line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    what = error.what if isinstance(error, NonFiniteError) else error
    return shortened(f"{type(error).__name__}: {what}{line}")
