"""A run's logged values as a figure of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3
_SIZE = (4.0, 2.8)  # of a plot, in inches


def plot(history: Sequence[Mapping[str, float]], names: Sequence[str] = ()) -> Figure:
    """Return a figure with a plot for each value; "train/loss" and "validation/loss" share one."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "plots", "FitResult.plot") from None
    plots: dict[str, list[str]] = {}
    for name in _chosen(history, names):
        stage, _, what = name.partition("/")
        plots.setdefault(what if stage in ("train", "validation", "test") else name, []).append(name)
    columns = min(_COLUMNS, len(plots))
    lines = math.ceil(len(plots) / columns)
    figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * lines), layout="constrained")
    for number, (title, shown) in enumerate(plots.items(), 1):
        axes = figure.add_subplot(lines, columns, number, title=title, xlabel="step")
        for name in shown:
            points = [(row["step"], row[name]) for row in history if name in row]
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else "")
        if len(shown) > 1:
            axes.legend()
    return figure


def _chosen(history: Sequence[Mapping[str, float]], names: Sequence[str]) -> Collection[str]:
    """Return the names to plot, all that were logged by default."""
    logged = dict.fromkeys(name for row in history for name in row if name != "step")
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"plot() takes names, such as plot('train/loss', 'lr'), not {name!r}")
        if name not in logged:
            raise ConfigError(f"no value {name!r} was logged. {nearest(name, logged)}")
    if not logged:
        raise ConfigError("there is nothing to plot: no value was logged")
    return names or logged
