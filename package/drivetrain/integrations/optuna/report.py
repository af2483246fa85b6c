"""What a study shows: which parameters matter, and Optuna's plots on one page."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna import visualization

from drivetrain.integrations.optuna.study import IDENTITY
from drivetrain.loggers.files import replace_page

_PLOTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "history": ("Value by trial", visualization.plot_optimization_history),
    "importances": ("Importance of the parameters", visualization.plot_param_importances),
    "slice": ("Value by each parameter", visualization.plot_slice),
    "parallel": ("All parameters of each trial", visualization.plot_parallel_coordinate),
    "contour": ("Value by pairs of parameters", visualization.plot_contour),
}
_MOST_CONTOURS = 6
"""The most parameters of a figure of pairs, which has a part for each."""


def objectives_of(study: optuna.Study) -> tuple[str, ...]:
    """Return the names that a search optimises."""
    return tuple(study.user_attrs[IDENTITY]["objective"])


def importances(study: optuna.Study, objectives: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the importance of each parameter for each objective; none where too few trials are complete."""
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


def write_page(study: optuna.Study, objectives: Sequence[str], path: Path) -> None:
    """Write one HTML page, which needs no network, with those of Optuna's plots that have enough trials."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # which says so of each plot
    parts = []
    figures: list[tuple[str, Any]] = []
    for index, objective in enumerate(objectives):
        target = _target(study, index)
        named = {} if target is None else {"target": target, "target_name": objective}
        for kind, (title, plot) in _PLOTS.items():
            if kind != "contour" or len(study.get_trials(deepcopy=False)[0].params) <= _MOST_CONTOURS:
                figures.append((f"{title}: {objective}", _figure(plot, study, named)))
    if len(objectives) in (2, 3):
        names = {"target_names": list(objectives)}
        figures.append(("Pareto front", _figure(visualization.plot_pareto_front, study, names)))
    elif any(each.intermediate_values for each in study.get_trials(deepcopy=False)):
        figures.append(("Values during the fits", _figure(visualization.plot_intermediate_values, study, {})))
    figures.append(("When the trials ran", _figure(visualization.plot_timeline, study, {})))
    has_script = False
    for title, figure in figures:
        if figure is not None:
            content = figure.to_html(full_html=False, include_plotlyjs=not has_script)
            has_script = True
            parts.append(f"<h2>{html.escape(title)}</h2>\n{content}")
    name = html.escape(study.study_name)
    replace_page(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Search {name}</title></head>\n'
        f'<body style="font-family: sans-serif">\n<h1>Search {name}</h1>\n{"".join(parts)}\n</body></html>\n',
    )


def _figure(plot: Callable[..., Any], study: optuna.Study, named: dict[str, Any]) -> Any:
    """Return a figure; None if the trials are too few for it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return plot(study, **named)
    except (ValueError, RuntimeError):
        return None
