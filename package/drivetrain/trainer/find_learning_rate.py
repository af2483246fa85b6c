"""The range test: train a copy of the task with a rate that rises from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.notebook.html import html_table, sparkline
from drivetrain.core.notebook.output import new_figure
from drivetrain.core.validation import count, number
from drivetrain.task.optim.build import apply_factor
from drivetrain.task.task import TaskModule
from drivetrain.trainer.assembly import check_task
from drivetrain.trainer.probe import Fit, Settings, probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from drivetrain.run.run import Run

_MEMORY = 0.9
"""The weight of the past in the smoothed loss; the next loss has the rest."""

_DIVERGED = 4.0
"""The test ends once the smoothed loss is so many times its lowest value, as in fastai."""

_FIRST = 10
"""Steps that neither end the test nor give the suggestion: the smoothed loss begins with few values."""


@dataclass(frozen=True, repr=False)
class LearningRateCurve:
    """The loss by the learning rate, from `Trainer.find_learning_rate`.

    Attributes:
        rates: The rate of each step.
        losses: The training loss of each step.
        smoothed: Its exponential mean, without the bias of the start.
        suggestion: The rate at which the smoothed loss, as a function of the rate's logarithm, falls fastest
            before its lowest value; None if the loss falls nowhere. That is the rule of Lightning's finder on
            a smoothed curve. The range test is Smith's (Cyclical Learning Rates for Training Neural Networks,
            2017, section 3.3, arXiv:1506.01186).
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None

    def __repr__(self) -> str:
        given = f"suggestion={self.suggestion}, {len(self.rates)} rates"
        span = f" from {self.rates[0]:.3g} to {self.rates[-1]:.3g}" if self.rates else ""
        return f"{type(self).__name__}({given}{span})"

    def _repr_html_(self) -> str:
        suggestion = "none" if self.suggestion is None else f"{self.suggestion:.3g}"
        return html_table(("suggested rate", "smoothed loss"), [(suggestion, sparkline(self.smoothed))])

    def plot(self) -> Figure:
        """Return the curve as a figure of matplotlib, which a notebook shows.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        figure = new_figure("LearningRateCurve.plot", figsize=(6.0, 4.0))
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss", xscale="log")
        axes.plot(self.rates, self.losses, alpha=0.4, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.legend()
        return figure


def find_learning_rate(
    settings: Settings,
    task: TaskModule,
    data: Any,
    fit: Fit[Settings],
    lowest: float,
    highest: float,
    steps: int,
    metric: str | None,
) -> LearningRateCurve:
    """Make the range test; see `Trainer.find_learning_rate`."""
    number("find_learning_rate(lowest=)", lowest, above=0)
    number("find_learning_rate(highest=)", highest, above=lowest)
    count("find_learning_rate(steps=)", steps, at_least=2 * _FIRST)
    name = metric or check_task(task).metric_name("train", None, "loss")
    if name is None:
        raise ConfigError(
            f"{type(task).__name__} names its values itself: give find_learning_rate(metric=) the name of the"
            " training loss"
        )
    test = _RangeTest(name, lowest, highest, steps)
    probe(settings, task, data, fit, max_steps=steps, callbacks=(test,))
    curve = test.curve()
    if not curve.rates:
        raise ConfigError(
            "find_learning_rate: the loss of the first step is not finite, before any rate was used. Look at"
            " the data and the loss"
        )
    return curve


class _RangeTest(Callback):
    """Sets the rate of each step, and keeps its loss."""

    def __init__(self, name: str, lowest: float, highest: float, steps: int) -> None:
        self._name = name
        ratio = math.log(highest / lowest) / (steps - 1)
        self._rates = [lowest * math.exp(ratio * step) for step in range(steps)]
        self._losses: list[float] = []
        self._smoothed: list[float] = []
        self._mean = 0.0

    def on_step_start(self, run: Run) -> None:
        """Set the rate: the first group's; the others keep their ratio to it."""
        rate, groups = self._rates[run.progress.steps], None
        for updater in run.engine.updaters.values():
            groups = groups or updater.optimizer.param_groups
            base = groups[0].get("initial_lr", groups[0]["lr"])
            if not base:
                raise ConfigError(
                    f"find_learning_rate multiplies the optimizer's rates, and the first one is {base!r}."
                    " Give the optimizer a rate, such as OptimizerConfig(lr=1e-3)"
                )
            apply_factor(updater.optimizer, rate / float(base))

    def on_log(self, run: Run) -> None:
        """Keep the loss, and stop once it has diverged."""
        if self._name not in run.logged:
            raise ConfigError(
                f"find_learning_rate(metric={self._name!r}): no step gives it."
                f" {nearest(self._name, run.logged)}"
            )
        self._losses.append(run.logged[self._name])
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * self._losses[-1]
        self._smoothed.append(self._mean / (1 - _MEMORY ** len(self._losses)))
        lowest = min(self._smoothed)
        rise = self._smoothed[-1] - lowest
        if len(self._losses) > _FIRST and rise > (_DIVERGED - 1) * abs(lowest):  # a loss may be negative
            run.stop(f"the loss has diverged at a rate of {self._rates[len(self._losses) - 1]:.3g}")

    def curve(self) -> LearningRateCurve:
        rates = self._rates[: len(self._losses)]
        return LearningRateCurve(
            tuple(rates), tuple(self._losses), tuple(self._smoothed), _steepest(rates, self._smoothed)
        )


def _steepest(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate at which the losses fall fastest before their lowest value; None if they do not fall.

    The steps have equal distances by the logarithm.
    """
    lowest = min(range(len(losses)), key=losses.__getitem__, default=0)
    slopes = {i: losses[i + 1] - losses[i - 1] for i in range(_FIRST, min(lowest + 1, len(losses) - 1))}
    best = min(slopes, key=slopes.__getitem__, default=None)
    return None if best is None or slopes[best] >= 0 else rates[best]
