"""The learning rates among the logged values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback

if TYPE_CHECKING:
    from drivetrain.run.run import Run


class LearningRateMonitor(Callback):
    """Adds the learning rate of every optimizer and parameter group to each log point.

    The rate is the one that the step at the log point used. If a schedule falls to zero, the last log point
    therefore has its last rate above zero.

    Names are those of `Run.learning_rates`: "lr" for parameters without a rate of their own, "lr/encoder" for
    ``ParameterGroup("encoder.*", lr=...)``, and "lr/<optimizer>" or "lr/<optimizer>/<group>" with several
    optimizers. They stay the same through a run. Settings in ``OptimizerConfig(schedules=...)`` are logged
    too: "weight_decay" or "weight_decay/encoder".
    """

    _rates: dict[str, float]

    def on_fit_start(self, run: Run) -> None:
        """Read the rates, for a log point before the first step."""
        self.on_step_start(run)

    def on_step_start(self, run: Run) -> None:
        """Read the rates of the step, because the schedules advance as soon as it is made."""
        self._rates = {}
        for each in run.engine.updaters.values():
            self._rates |= each.scheduled_values()

    def on_log(self, run: Run) -> None:
        """Log the rates of the latest step."""
        for name, rate in self._rates.items():
            run.log(name, rate)
