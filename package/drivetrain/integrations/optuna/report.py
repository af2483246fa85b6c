"""Facts about a study: its trials, the best of them, and the importance of each parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.registry import is_installed
from drivetrain.integrations.optuna.result import best_numbers, trials_of

if TYPE_CHECKING:
    import optuna


def search_facts(directory: Path, storage: str | None = None) -> dict[str, Any]:
    """Return what the report shows of a search, as plain values.

    Args:
        directory: The directory of the search.
        storage: The address of its storage, where it has a password; None takes the recorded one.

    Returns:
        "directory", "objectives", "directions" ("min" or "max"), "parameters" (the scale of each: "linear",
        "log" or "choice"), "trials" by number, the numbers of the "best", and "importances" by objective.

    Raises:
        ConfigError: The directory is not one of a search.
        MissingDependencyError: Optuna is not installed.
    """
    if not is_installed("optuna"):
        raise MissingDependencyError("optuna", "search", "reading a search")
    from drivetrain.integrations.optuna.study import recorded_study

    study = recorded_study(directory, storage)
    objectives = objectives_of(study)
    scales = {
        name: "log" if getattr(each, "log", False) else "choice" if hasattr(each, "choices") else "linear"
        for trial in study.get_trials(deepcopy=False)
        for name, each in trial.distributions.items()
    }
    return {
        "directory": str(directory),
        "objectives": list(objectives),
        "directions": [each.name[:3].lower() for each in study.directions],
        "parameters": scales,
        "trials": [
            {
                "number": each.number,
                "state": each.state,
                "parameters": each.parameters,
                "values": each.values,
                "seconds": each.seconds,
                "failure": each.failure,
                "run": str(each.run_dir),
            }
            for each in trials_of(study, objectives, directory)
        ],
        "best": best_numbers(study),
        "importances": importances(study, objectives),
    }


def objectives_of(study: optuna.Study) -> tuple[str, ...]:
    """Return the names that a search optimises."""
    from drivetrain.integrations.optuna.study import IDENTITY

    return tuple(study.user_attrs[IDENTITY]["objective"])


def importances(study: optuna.Study, objectives: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the importance of each parameter for each objective; none where too few trials are complete."""
    import optuna

    found = {}
    for index, name in enumerate(objectives):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of parameters that some trials lack
                found[name] = dict(
                    optuna.importance.get_param_importances(study, target=_target(study, index))
                )
        except (ValueError, RuntimeError):  # fewer than two trials, or all with one value
            found[name] = {}
    return found


def _target(study: optuna.Study, index: int) -> Callable[[Any], float] | None:
    return None if len(study.directions) == 1 else lambda trial: float(trial.values[index])
