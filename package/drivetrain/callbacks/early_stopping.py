"""Stop when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.monitored_metric import MonitoredMetric
from drivetrain.core.direction import MODES, direction_of, improves, resolved_direction
from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name, count, flag, number, one_of

if TYPE_CHECKING:
    from drivetrain.run.run import Run


@by_name
class EarlyStopping(Callback):
    """Stops a fit when a metric has not improved for `patience` of its values in a row.

    A metric of validation is compared after each validation. Any other metric, such as "train/loss", is
    compared at each log point that has it; with `Trainer(log_every="1 epoch")` that is the mean of each
    epoch. A log interval that is longer than an epoch becomes one epoch.

    A value improves when it beats the best so far by more than the threshold; in "rel" mode the threshold is
    a fraction of the best value's magnitude. `Trainer(on_nonfinite=...)` decides about a NaN or an infinity;
    with "skip", or without `check_finite`, it counts as no improvement. The count and the best value are
    saved in checkpoints; a new fit starts without them.

    Args:
        metric: The name of a logged value.
        mode: "min" if less is better, "max" if more is. "auto" takes it from the metric's own
            `higher_is_better`, else from a well-known name (a loss, an error, an accuracy, ...); if neither
            says, the fit is refused.
        patience: The number of values without improvement that stops the fit; at least 1.
        threshold: The difference that an improvement must exceed; not negative.
        threshold_mode: "abs" or "rel".
        min_epochs: The number of complete epochs before the first possible stop. `Trainer(min_steps=...)`
            holds for all callbacks.
        stop_at: A target value: reaching it stops the fit at once.
        diverged_at: A value so bad that reaching it stops the fit at once; None disables it.
        check_finite: Whether a NaN or an infinity is treated as `Trainer(on_nonfinite=...)` says. A
            validation loss always is.
        strict: Whether a metric that the fit does not log is an error. Otherwise such a metric never stops
            the fit.

    Raises:
        ConfigError: An argument is out of its range, or a fit that begins cannot give the metric. With
            `strict`, a fit that has saved its end also raises it, if the metric was never logged.
    """

    def __init__(
        self,
        metric: str = "validation/loss",
        mode: str = "auto",
        patience: int = 3,
        threshold: float = 0.0,
        threshold_mode: str = "abs",
        min_epochs: int = 0,
        stop_at: float | None = None,
        diverged_at: float | None = None,
        check_finite: bool = True,
        strict: bool = True,
    ) -> None:
        if not isinstance(metric, str) or not metric:
            raise ConfigError(
                f"EarlyStopping(metric=) takes a name such as 'validation/loss', not {metric!r}"
            )
        self.mode = one_of("mode of EarlyStopping", mode, MODES)
        self.threshold_mode = one_of("threshold_mode of EarlyStopping", threshold_mode, ("abs", "rel"))
        self.patience = count("EarlyStopping(patience=)", patience, at_least=1)
        self.threshold = number("EarlyStopping(threshold=)", threshold, at_least=0)
        self.min_epochs = count("EarlyStopping(min_epochs=)", min_epochs)
        for name, target in (("stop_at", stop_at), ("diverged_at", diverged_at)):
            if target is not None:
                number(f"EarlyStopping({name}=)", target)
        self.check_finite = flag("EarlyStopping(check_finite=)", check_finite)
        self.strict = flag("EarlyStopping(strict=)", strict)
        self.diverged_at = diverged_at
        self.metric = metric
        self.stop_at = stop_at
        self.best: float | None = None
        self.without_improvement = 0
        self._monitored = MonitoredMetric(metric, "early stopping monitors", required=strict)
        self._loaded = False
        self._direction = mode if mode != "auto" else direction_of(metric)
        self._check_limits()

    def _check_limits(self) -> None:
        """Check that the two limits, if both are given, leave values between them."""
        if self._direction is None or self.stop_at is None or self.diverged_at is None:
            return
        better, worse = self.stop_at, self.diverged_at
        if better >= worse if self._direction == "min" else better <= worse:
            raise ConfigError(
                f"early stopping has stop_at={better} and diverged_at={worse} with mode={self._direction!r}:"
                " each value would stop the fit. diverged_at is the worse of the two"
            )

    def on_fit_start(self, run: Run) -> None:
        """Reset after an earlier fit, unless this one resumes from a checkpoint.

        Raises:
            ConfigError: The fit cannot give the metric, or it is unknown whether a larger value is better.
        """
        self._monitored.begin(run)
        known, argument = run.names.direction(self.metric), f"EarlyStopping({self.metric!r}, mode={{}})"
        self._direction = resolved_direction(self.mode, known, self.metric, argument)
        self._check_limits()
        if not self._loaded:
            self.best = None
            self.without_improvement = 0
        if self._loaded and self.metric in run.metrics:
            self._decide(run, run.metrics[self.metric])  # a run that this callback stopped stays stopped

    def on_log(self, run: Run) -> None:
        """Judge the metric if this log point has it."""
        if run.in_turn and self._monitored.has_new_value(run) and self._judge(run, run.metrics[self.metric]):
            run.log_now()  # what is left is in the checkpoint: a resume of a stopped run logs nothing again

    def _judge(self, run: Run, value: float) -> bool:
        if self.check_finite:
            run.nonfinite.judge_values({self.metric: value})
        relative = self.threshold_mode == "rel"
        if improves(value, self.best, self._direction, self.threshold, relative):
            self.best = value
            self.without_improvement = 0
        else:
            self.without_improvement += 1
        return self._decide(run, value)

    def _decide(self, run: Run, value: float) -> bool:
        """Stop the run if it is time; return whether it is."""
        if run.progress.epoch < self.min_epochs or run.length.is_early(run.progress):
            return False
        if math.isfinite(value) and self._is_beyond(self.stop_at, value, True):
            run.stop(f"early stopping: {self.metric} is {value:.6g} and reached {self.stop_at:.6g}")
        elif self._is_beyond(self.diverged_at, value, False):
            run.stop(f"early stopping: {self.metric} is {value:.6g}, diverged beyond {self.diverged_at:.6g}")
        elif self.without_improvement >= self.patience:
            of = "evaluation" if run.names.stage_of(self.metric) == "validation" else "log point"
            run.stop(f"early stopping: {self._reason(value, of)}")
        else:
            return False
        return True

    def on_fit_end(self, run: Run) -> None:
        """Check that the metric was logged."""
        self._monitored.end(run)
        self._loaded = False

    def on_exception(self, run: Run) -> None:
        """Mark the fit as finished."""
        self._loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and the count of values since."""
        return {"best": self.best, "without_improvement": self.without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the next fit continues from there."""
        self.best = None if state["best"] is None else float(state["best"])
        self.without_improvement = int(state["without_improvement"])
        self._loaded = True

    def _is_beyond(self, limit: float | None, value: float, on_the_better_side: bool) -> bool:
        if limit is None:
            return False
        return value <= limit if (self._direction == "min") is on_the_better_side else value >= limit

    def _reason(self, value: float, of: str) -> str:
        count = f"{self.without_improvement} {of}{'s' if self.without_improvement > 1 else ''}"
        if self.best is None:
            return f"{self.metric} was not finite for {count}; it is {value}"
        now = "" if math.isfinite(value) else f"; it is {value} now"
        return f"{self.metric} did not improve on {self.best:.6g} for {count}{now}"
