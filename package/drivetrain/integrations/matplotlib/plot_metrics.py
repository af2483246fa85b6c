"""Metrics as figures: confusion matrices, curves, and whatever else has a `plot`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.registry import is_installed
from drivetrain.core.validation import by_name
from drivetrain.data import to_host
from drivetrain.engine.metrics.declared import is_flat
from drivetrain.loggers.base import check_loggers, takes
from drivetrain.loggers.media import Figure

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy


@by_name
class PlotMetrics(Callback):
    """Draws declared metrics that have a `plot`, as torchmetrics' have, at the end of a fit's validations.

    The figure of the metric "confusion" is logged as "validation/confusion/plot". It needs matplotlib. A
    metric with `labels`, a list of texts, is drawn with them where its `plot` takes labels.

    A metric that is drawn as a matrix or a curve logs no numbers, not even in training: a curve of all
    thresholds would have thousands. A metric that is a number or a vector is also logged.

    Args:
        metrics: The names in the task's `metrics()`. None draws those that compute a matrix or a curve.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: When a Trainer is made: no logger takes figures. At the start of a fit: the fit has no
            validation, a name is unknown, or a metric has no `plot`.
    """

    def __init__(self, metrics: Sequence[str] | None = None) -> None:
        if not is_installed("matplotlib"):
            raise MissingDependencyError("matplotlib", "plots", "PlotMetrics")
        if isinstance(metrics, str):
            metrics = (metrics,)
        self.metrics = None if metrics is None else tuple(metrics)
        self._drawn: dict[str, Any] = {}

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that a logger takes figures.

        Raises:
            ConfigError: No logger does.
        """
        if trainer.dry_run is not None:  # a trial that writes nothing has no loggers
            return
        if not any(takes(each, "figure") for each in check_loggers(trainer.loggers)):
            raise ConfigError(
                f"PlotMetrics needs a logger that takes figures, and loggers={trainer.loggers!r} has none."
                " Add 'tensorboard', or another one with log_media(values, step) and 'figure' in its `takes`"
            )

    def on_fit_start(self, run: Run) -> None:
        """Look up the metrics.

        Raises:
            ConfigError: There is no validation, or no such metric with a `plot`.
        """
        metrics = [each for loader, _ in run.evaluation_feeds if (each := run.metrics_of(loader))]
        if not metrics:
            raise ConfigError(
                "PlotMetrics draws metrics of validations, and this fit has no validation data, or its task"
                " no metrics()"
            )
        able = {name: each for of in metrics for name, each in of.metrics.items() if _has_plot(each)}
        for name in self.metrics or ():
            if name not in able:
                raise ConfigError(
                    f"PlotMetrics(metrics=): {name!r} is no metric of the task's metrics() with a method"
                    f" plot. {nearest(name, able)}"
                )
        if not able:
            raise ConfigError("PlotMetrics: no metric of the task's metrics() has a method plot")
        self._drawn = {name: each for name, each in able.items() if name in (self.metrics or able)}
        for each in filter(
            None, (run.train_metrics, *metrics)
        ):  # those of training, to give no numbers there
            each.drawn = self._drawn

    def on_evaluation_end(self, run: Run) -> None:
        """Draw what the metrics have computed."""
        if run.train_feed is None or not run.loggers or run.evaluation.is_sanity_check:
            return
        for each in run.evaluation.passes:
            for name, metric in self._drawn.items():
                full = run.task.metric_name(run.stage, each.loader, name)
                result = each.results.get(name)
                if result is None or full is None or (self.metrics is None and is_flat(result)):
                    continue
                run.log(f"{full}/plot", Figure(_plot(metric, result)))


def _has_plot(metric: Any) -> bool:
    plot = getattr(metric, "plot", None)
    # The plot of torchmetrics' base class raises.
    return callable(plot) and getattr(plot, "__qualname__", "") != "Metric.plot"


def _plot(metric: Any, result: Any) -> Any:
    from matplotlib import pyplot

    labels = getattr(metric, "labels", None)
    takes_labels = "labels" in inspect.signature(metric.plot).parameters
    drawn = metric.plot(to_host(result), **({"labels": labels} if labels and takes_labels else {}))
    figure = drawn[0] if isinstance(drawn, tuple) else drawn
    pyplot.close(figure)  # which keeps each figure otherwise
    return figure
