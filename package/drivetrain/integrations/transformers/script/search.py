"""The search over hyper-parameters of a script's Trainer, over Optuna."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_utils import (
    BestRun,
    HPSearchBackend,
    default_compute_objective,
    default_hp_space_optuna,
)

from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.registry import is_installed
from drivetrain.distributed.ranks import Ranks
from drivetrain.run.run import Run

_LOG = logger(__name__)

_OPTIMIZE = ("timeout", "gc_after_trial", "catch")
"""The keywords for `Study.optimize`; the others are for `optuna.create_study`."""


def checked_backend(given: object) -> HPSearchBackend:
    """Return the backend of a search after a check.

    Raises:
        ConfigError: It is another one than Optuna.
        MissingDependencyError: Optuna is not installed.
    """
    name = getattr(given, "value", given)
    if name == "sigopt":
        raise ConfigError("backend='sigopt': SigOpt's service has ended. Use backend='optuna'")
    if name in ("ray", "wandb"):
        raise ConfigError(
            f"backend={name!r} is not offered here. Use backend='optuna'; or make a Trainer in each trial"
            f" that {'Ray Tune' if name == 'ray' else 'a sweep'} starts"
        )
    if name not in (None, "optuna"):
        raise ConfigError(f"there is no backend {given!r}. {nearest(str(name), ['optuna'])}")
    if not is_installed("optuna"):
        raise MissingDependencyError("optuna", "search", "hyperparameter_search")
    return HPSearchBackend.OPTUNA


class HyperparameterSearch:
    """A search in progress: its trials, and the objective of each.

    Args:
        space: Takes Optuna's trial, and returns options of the arguments by name; None takes transformers'.
        objective: Takes the metrics of an evaluation; None takes transformers'.
        name: Returns the name of a trial; None names it "run-" and its number.

    Attributes:
        objective: The objective of the current trial; None before its first evaluation.
    """

    def __init__(
        self,
        space: Callable[[Any], Mapping[str, Any]] | None,
        objective: Callable[[dict[str, float]], Any] | None,
        name: Callable[[Any], str] | None,
    ) -> None:
        self.space: Callable[[Any], Mapping[str, Any]] = space or default_hp_space_optuna
        self.compute_objective = objective or default_compute_objective
        self.name = name
        self.objective: Any = None
        self._trial: Any = None
        self._is_pruned = False

    def run(
        self,
        train: Callable[[Any], object],
        evaluate: Callable[[], dict[str, float]],
        ranks: Ranks,
        trials: int,
        direction: str | list[str],
        options: dict[str, Any],
    ) -> BestRun | list[BestRun] | None:
        """Run all trials, on all ranks.

        Args:
            train: Trains with a trial.
            evaluate: Evaluates, after a trial without an evaluation.
            ranks: The ranks, which train together.
            trials: The number of trials.
            direction: "minimize" or "maximize", or one for each objective.
            options: Keywords for `optuna.create_study` and `Study.optimize`.

        Returns:
            The best trial, of several objectives the best ones; None on all ranks but the first.

        Raises:
            ConfigError: Trials were to run in threads.
        """
        import optuna

        if options.pop("n_jobs", 1) != 1:
            raise ConfigError(
                "hyperparameter_search(n_jobs=...) would run trials in threads of this process, which share"
                " its devices, random streams and arguments. Start the script several times with one"
                " storage='sqlite:///search.db' and load_if_exists=True, or use drivetrain.search(parallel=)"
            )

        def one(trial: Any) -> Any:
            self.objective = None
            train(trial)
            if self.objective is None:
                self.objective = self.compute_objective(evaluate())
            return self.objective

        def lead(trial: Any) -> Any:
            self.space(trial)  # draws on this rank alone
            ranks.first(lambda: optuna.trial.FixedTrial(trial.params, trial.number))
            return one(trial)

        if not ranks.is_first:
            while (trial := ranks.first(lambda: None)) is not None:
                try:
                    one(trial)
                except optuna.TrialPruned:
                    continue
            return None
        named = {name: options.pop(name) for name in _OPTIMIZE if name in options}
        directions = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
        study = optuna.create_study(**directions, **options)
        study.optimize(one if ranks.alone else lead, n_trials=trials, **named)
        ranks.first(lambda: None)
        if isinstance(direction, list):
            return [BestRun(str(each.number), each.values, each.params) for each in study.best_trials]
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params)

    def set_arguments(self, args: Any, trial: Any) -> dict[str, Any]:
        """Begin a trial: set the options of the arguments that its values name, and return the values."""
        self._trial, self._is_pruned = trial, False
        values = dict(self.space(trial))
        for name, value in values.items():
            if not hasattr(args, name):
                _LOG.warning(
                    f"{name!r} of hp_space is no option of TrainingArguments, so only model_init sees it"
                )
                continue
            before = getattr(args, name)
            setattr(args, name, value if before is None else type(before)(value))
        return values

    def directory(self, base: str, trial: Any) -> str:
        """Return the folder of a trial."""
        return os.path.join(base, f"run-{trial.number}" if self.name is None else self.name(trial))

    def report(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Report an evaluation of the trial's fit; all ranks stop after this step if it is to be pruned."""
        self.objective = self.compute_objective(dict(metrics))
        trial, objective, step = self._trial, self.objective, run.progress.steps

        def judge() -> bool:
            study = getattr(trial, "study", None)  # a FixedTrial has none
            if study is None or len(study.directions) > 1:
                return False
            trial.report(objective, step)
            return bool(trial.should_prune())

        if run.engine.ranks.first(judge):
            self._is_pruned = True
            run.stop(f"pruned after step {step}")

    def end_trial(self) -> None:
        """End a trial.

        Raises:
            optuna.TrialPruned: It was pruned.
        """
        import optuna

        if self._is_pruned:
            raise optuna.TrialPruned
