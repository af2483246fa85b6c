"""The learning rates among the logged values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback

if TYPE_CHECKING:
    from drivetrain.run.run import Run


class LearningRateMonitor(Callback):
    """Adds the learning rate of every optimizer and parameter group to each log point.

    Names are those of `Run.learning_rates`: "lr" for parameters without a rate of their own, "lr/encoder" for
    ``ParameterGroup("encoder.*", lr=...)``, and "lr/<optimizer>" or "lr/<optimizer>/<group>" with several
    optimizers. They stay the same through a run.
    """

    def on_log(self, run: Run) -> None:
        """Log the rates of the next step."""
        for name, rate in run.learning_rates().items():
            run.log(name, rate)
