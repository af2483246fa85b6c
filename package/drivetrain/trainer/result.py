"""The results of `fit` and `predict`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, nearest, repr_without_secrets
from drivetrain.core.notebook.html import html_table, sparkline
from drivetrain.core.notebook.output import new_figure, new_frame
from drivetrain.core.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3
_SIZE = (4.0, 2.8)  # of a plot, in inches


@dataclass(frozen=True)
class FitResult:
    """The result of a finished fit.

    Attributes:
        metrics: The latest value of every logged name.
        progress: The counts at the end.
        stop_reason: Why training ended.
        run_dir: Where files went, or None when none were asked for.
        last_checkpoint: The newest checkpoint, or None.
        best_checkpoint: The best checkpoint, or None; of several policies, by the first that keeps any.
        model_path: The finished weights: the file, or the folder that the task writes; or None.
        history_path: The file that `history` reads, or None.
        best_checkpoints: The best checkpoint by each metric that ranks and has had a value.
        best_value: The metric's value for `best_checkpoint`, or None.
    """

    metrics: dict[str, float]
    progress: Progress
    stop_reason: str
    run_dir: Path | None
    last_checkpoint: str | None
    best_checkpoint: str | None
    model_path: str | None
    history_path: str | None = None
    best_checkpoints: dict[str, str] = field(default_factory=dict)
    best_value: float | None = None

    @property
    def history(self) -> list[dict[str, float]]:
        """The logged values from the start of the run, including those before a resume: for each log point a
        mapping with "step", the number of steps made, and the values by name.

        They are read from the file of the logger "csv" or "jsonl", so that a long run holds none in memory.

        Raises:
            ConfigError: Neither logger was in use, or the file is gone.
        """
        if self.history_path is None:
            raise ConfigError(
                "this fit has no history: it is read from the file of the logger 'csv' or 'jsonl', and the"
                " fit had neither. Give the Trainer loggers='csv'"
            )
        from drivetrain.loggers.history import read_history

        return read_history(Path(self.history_path))

    __repr__ = repr_without_secrets

    def _repr_html_(self) -> str:
        """Return the result as a table, which a notebook shows."""
        progress = self.progress
        facts: list[tuple[str, object]] = [("ended", self.stop_reason)]
        facts += [("steps, epochs", f"{progress.steps:,}, {progress.epoch}")]
        facts += [("time", f"{progress.seconds:,.1f} s")]
        paths = {"run directory": self.run_dir, "weights": self.model_path}
        paths |= {f"best by {by}": path for by, path in self.best_checkpoints.items()}
        facts += [(name, path) for name, path in paths.items() if path is not None]
        history: Sequence[Mapping[str, float]] = ()
        with suppress(ConfigError):  # without a history there are no curves
            history = self.history
        curves = {name: sparkline([row[name] for row in history if name in row]) for name in self.metrics}
        values = [(name, f"{value:.6g}", curves[name]) for name, value in self.metrics.items()]
        return html_table(("value", "last", "curve"), values) + html_table((), facts)

    def to_pandas(self) -> Any:
        """Return `history` as a DataFrame of pandas, with a row for each log point and the column "step".

        A name without a value at a log point has NaN there.

        Raises:
            ConfigError: There is no `history`.
            MissingDependencyError: pandas is not installed.
        """
        return new_frame("FitResult.to_pandas", self.history)

    def plot(self, *names: str) -> Figure:
        """Return the logged values as a figure of matplotlib, which a notebook shows.

        `figure.savefig("curves.png")` writes it. "train/loss" and "validation/loss" share a plot.

        Args:
            *names: The names of the values, such as "train/loss"; without any, all values.

        Raises:
            ConfigError: There is no `history`, or no value has the name.
            MissingDependencyError: matplotlib is not installed.
        """
        return _plot(self.history, names)


@dataclass(frozen=True)
class PredictResult:
    """The result of `Trainer.predict(..., metrics=True)`.

    Attributes:
        outputs: What `predict` returns without metrics: the outputs of each batch, those of all samples
            with `joined`, or the list of files.
        metrics: What `validate` returns on the same data.
    """

    outputs: Any
    metrics: dict[str, float]


def _plot(history: Sequence[Mapping[str, float]], names: Sequence[str] = ()) -> Figure:
    """Return a figure with a plot for each value; "train/loss" and "validation/loss" share one."""
    plots: dict[str, list[str]] = {}
    for name in _chosen(history, names):
        stage, _, what = name.partition("/")
        plots.setdefault(what if stage in ("train", "validation", "test") else name, []).append(name)
    columns = min(_COLUMNS, len(plots))
    lines = math.ceil(len(plots) / columns)
    figure = new_figure("FitResult.plot", figsize=(_SIZE[0] * columns, _SIZE[1] * lines))
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
        if name not in logged:
            raise ConfigError(f"no value {name!r} was logged. {nearest(name, logged)}")
    if not logged:
        raise ConfigError("there is nothing to plot: no value was logged")
    return names or logged
