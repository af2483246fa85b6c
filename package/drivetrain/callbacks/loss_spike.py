"""Spikes of the loss: skip the step, or stop the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError, DivergenceError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, count, flag, number
from drivetrain.engine.metrics.means import Row
from drivetrain.run.setting_checks import check_skipping
from drivetrain.task.output import wide_dtype

if TYPE_CHECKING:
    from drivetrain.engine.updater import Updater
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

ACTIONS = ("skip", "stop")

DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

LEAST = 1e-3
"""The smallest deviation to assume, as a fraction of the median: equal losses would have none."""

_UNREAD = 1000
"""The most steps between two reads of the losses, if no log point or save comes first."""


@by_name
class LossSpike(Callback):
    """Detects steps whose loss is far above the recent ones, and skips them or stops the run.

    A loss is a spike when ``(loss - median) / max(1.4826 MAD, 0.001 |median|)`` is above the threshold. The
    median and the median absolute deviation are taken over the last `window` losses that were not spikes.
    This is the modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993; unlike a
    mean and a variance, it is not moved by spikes. A NaN or infinite loss is a spike, too. Losses are those
    of whole steps, over all micro-batches and ranks. The first `window` losses are not judged.

    "skip" leaves the step out before the optimizer makes it, as `on_nonfinite="skip"` does. It needs the
    loss on the host in every step.

    "stop" checks losses at log points and before saves, where the run waits for the device anyway. It ends
    the run with an error before a checkpoint contains the spike, so the newest checkpoint is from before the
    spike.

    Args:
        action: "skip" or "stop".
        metric: The name of the returned value to monitor.
        threshold: The number of deviations that makes a spike; above 0.
        window: The number of losses to compare with; at least 10.
        max_in_a_row: With "skip", the number of steps in a row that may be skipped; one more ends the run
            with an error. None allows 10.
        sync: Whether "skip" may wait for an accelerator in every step.

    Raises:
        ConfigError: An argument that is not allowed; when a Trainer is made, "skip" on an accelerator without
            `sync`; or, at a log point, a metric that no step returns.
        StrategyError: When a Trainer is made: "skip" with a strategy that cannot skip steps.
        DivergenceError: During a run: a spike with "stop", or more of them in a row than "skip" allows.
    """

    def __init__(
        self,
        action: str = "stop",
        *,
        metric: str = "loss",
        threshold: float = 6.0,
        window: int = 100,
        max_in_a_row: int | None = None,
        sync: bool = False,
    ) -> None:
        if action not in ACTIONS:
            by_hand = "'stop' ends the run; resume from a checkpoint before the spike"
            help = by_hand if action == "rollback" else nearest(str(action), ACTIONS)
            raise ConfigError(f"LossSpike(action={action!r}). {help}")
        self.action = action
        self.metric = metric
        self.threshold = number("LossSpike(threshold=...)", threshold, above=0)
        self.window = count("LossSpike(window=...)", window, at_least=10)
        if max_in_a_row is not None and action != "skip":
            raise ConfigError(
                f"LossSpike({action!r}, max_in_a_row={max_in_a_row!r}): that is a limit of 'skip'"
            )
        limit = 10 if max_in_a_row is None else max_in_a_row
        self.max_in_a_row = count("LossSpike(max_in_a_row=...)", limit, at_least=1)
        flag("LossSpike(sync=...)", sync)
        self.sync = sync
        self._loaded = False
        self._run: Run | None = None
        self._reset()

    def _reset(self) -> None:
        self.skipped = self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=self.window)
        self._pending: list[tuple[int, Sequence[Row]]] = []
        self._names: set[str] = set()  # of returned values, with "skip" until the metric is among them

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the run supports the action; see the class."""
        if self.action != "skip":
            return
        check_skipping("LossSpike(action='skip')", strategy)
        if strategy.device.type != "cpu" and not self.sync:
            raise ConfigError(
                f"LossSpike(action='skip') on {strategy.device.type!r} waits for the device in every step,"
                " since the loss must be known before the optimizer's step. Allow it with sync=True, or use"
                " action='stop', which looks at log points and before saves"
            )

    # The hooks.

    def on_fit_start(self, run: Run) -> None:
        """Reset after an earlier fit, unless this one resumes from a checkpoint."""
        if not self._loaded:
            self._reset()
        self._run = run
        if self.action == "skip":
            run.nonfinite.gate.refusals.append(self._refuses)

    def on_step_end(self, run: Run) -> None:
        """Keep the step's loss, on the device."""
        result = run.result
        if self.action == "stop" and result is not None and result.applied:
            self._pending.append((result.step, result.step_values))
            if len(self._pending) >= _UNREAD:
                self._judge()
        elif self.action == "skip" and result is not None and self.metric not in self._names:
            self._names |= _names(result.step_values)

    def on_log(self, run: Run) -> None:
        """With "stop", check the losses since the last log point or save; with "skip", count the skips.

        Raises:
            ConfigError: The training step does not return the metric.
            DivergenceError: There was a spike.
        """
        self._judge()
        self._check(self._names)
        if self.action == "skip" and run.stage == "train":
            run.log("spikes", self.skipped)

    @contextmanager
    def saving(self, run: Run) -> Iterator[None]:
        """Check the losses before a save, so that no checkpoint contains a spike."""
        self._judge()
        yield

    def on_fit_end(self, run: Run) -> None:
        """Check the last losses, and mark the fit as finished."""
        self._judge()
        self._run, self._loaded = None, False

    def on_exception(self, run: Run) -> None:
        """Mark the fit as finished."""
        self._run, self._loaded = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the window and the counts."""
        return {
            "losses": list(self._losses),
            "skipped": self.skipped,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the next fit continues from there."""
        self._reset()
        self._losses.extend(float(each) for each in state["losses"])
        self.skipped, self._in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self._loaded = True

    # Losses.

    def _check(self, names: set[str]) -> None:
        if names and self.metric not in names:
            raise ConfigError(f"LossSpike(metric={self.metric!r}). {nearest(self.metric, names)}")

    def _deviations(self, loss: float) -> float:
        """Return how many deviations a loss is above the median; infinite for a non-finite loss."""
        if not math.isfinite(loss):
            return math.inf
        if len(self._losses) < self.window:
            return 0.0
        middle = median(self._losses)
        spread = DEVIATION * median(abs(each - middle) for each in self._losses)
        return (loss - middle) / max(spread, LEAST * abs(middle), 1e-300)

    def _of_steps(self, steps: Sequence[tuple[int, Sequence[Row]]]) -> list[tuple[int, float]]:
        """Return the losses of steps, over all ranks; waits for the device once for all of them."""
        run = self._run
        assert run is not None
        numbers: list[Tensor] = []
        wide = wide_dtype(run.engine.device)
        for _, rows in steps:
            both = torch.zeros(2, dtype=wide, device=run.engine.device)
            for names, values, weight in rows:
                if self.metric in names and (isinstance(weight, Tensor) or weight):
                    value = values.reshape(-1)[names.index(self.metric)].to(wide)
                    # A number goes to the kernel; as a tensor it would be a copy that waits for the device.
                    factor = torch.ones_like(value) * weight
                    both += torch.stack([torch.where(factor == 0, 0, value * factor), factor])
            numbers.append(both)
        sums = run.engine.data_ranks.total(torch.cat(numbers).tolist())
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [
            (step, total / weight) for (step, _), (total, weight) in zip(steps, pairs, strict=True) if weight
        ]

    def _refuses(self, updater: Updater, rows: Sequence[Row]) -> bool:
        """Return whether the step is skipped; see `drivetrain.engine.skip.Refusal`."""
        run = self._run
        assert run is not None
        step = run.progress.steps
        for _, loss in self._of_steps([(step, rows)]):
            far = self._deviations(loss)
            if far <= self.threshold:
                self._losses.append(loss)
                self._in_a_row = 0
                continue
            self.skipped += 1
            self._in_a_row += 1
            if self._in_a_row > self.max_in_a_row:
                raise DivergenceError(
                    f"step {step} was tried {self._in_a_row} times and had a spike each time; the last:"
                    f" {self._describe(loss, far)}. The loss has left its level, or the data have changed;"
                    f" allowed are max_in_a_row={self.max_in_a_row}"
                )
            self._warn(f"step {step} was not made: {self._describe(loss, far)}")
            return True
        return False

    def _judge(self) -> None:
        """Judge the steps since the last call; all ranks judge the same numbers.

        Raises:
            DivergenceError: One of them is a spike.
        """
        pending, self._pending = self._pending, []
        self._check({name for _, rows in pending for name in _names(rows)})
        for step, loss in self._of_steps(pending) if pending else ():
            far = self._deviations(loss)
            if far <= self.threshold:
                self._losses.append(loss)
                continue
            assert self._run is not None
            self._run.stopping.restart_is_pointless = True
            raise DivergenceError(
                f"a spike at step {step}: {self._describe(loss, far)}. No checkpoint contains it. Resume with"
                " LossSpike('skip'), which leaves this step out, or with a lower learning rate and"
                " fit(..., optimizer_settings='program')"
            )

    def _describe(self, loss: float, far: float) -> str:
        if not math.isfinite(loss):
            return f"{self.metric} is {loss}"
        middle = median(self._losses)
        return f"{self.metric} is {loss:.6g}, {far:.3g} deviations above the median {middle:.6g}"

    def _warn(self, text: str) -> None:
        assert self._run is not None
        if self._run.is_main:
            _LOG.warning(text)


def _names(rows: Sequence[Row]) -> set[str]:
    return {name for names, _, _ in rows for name in names}
