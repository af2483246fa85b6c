"""Spikes of the loss, which end a run before a checkpoint contains them."""

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
from drivetrain.core.validation import by_name, count, number
from drivetrain.engine.metrics.means import Row
from drivetrain.task.output import wide_dtype

if TYPE_CHECKING:
    from drivetrain.run.run import Run

DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

LEAST = 1e-3
"""The smallest deviation to assume, as a fraction of the median: equal losses would have none."""

_UNREAD = 1000
"""The most steps between two reads of the losses, if no log point or save comes first."""


@by_name
class LossSpike(Callback):
    """Ends the run at a step whose loss is far above the recent ones.

    A loss is a spike when ``(loss - median) / max(1.4826 MAD, 0.001 |median|)`` is above the threshold. The
    median and the median absolute deviation are taken over the last `window` losses that were not spikes.
    This is the modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993; unlike a
    mean and a variance, it is not moved by spikes. A NaN or infinite loss is a spike, too. Losses are those
    of whole steps, over all micro-batches and ranks. The first `window` losses are not judged.

    Losses are checked at log points and before saves, where the run waits for the device anyway. A spike
    ends the run with an error before a checkpoint contains it, so the newest one is from before it. Resume
    from that with ``fit(..., skip="20 steps")``, which leaves out the data of the spike.

    Args:
        metric: The name of the returned value to watch.
        threshold: The number of deviations that makes a spike; above 0.
        window: The number of losses to compare with; at least 10.

    Raises:
        ConfigError: An argument that is not allowed; or, at a log point, a metric that no step returns.
        DivergenceError: During a run: a spike.
    """

    def __init__(self, *, metric: str = "loss", threshold: float = 6.0, window: int = 100) -> None:
        self.metric = metric
        self.threshold = number("LossSpike(threshold=...)", threshold, above=0)
        self.window = count("LossSpike(window=...)", window, at_least=10)
        self._loaded = False
        self._run: Run | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.window)
        self._pending: list[tuple[int, Sequence[Row]]] = []

    # The hooks.

    def on_fit_start(self, run: Run) -> None:
        """Reset after an earlier fit, unless this one resumes from a checkpoint."""
        if not self._loaded:
            self._reset()
        self._run = run

    def on_step_end(self, run: Run) -> None:
        """Keep the step's loss, on the device."""
        result = run.result
        if result is not None and result.applied:
            self._pending.append((result.step, result.step_values))
            if len(self._pending) >= _UNREAD:
                self._judge()

    def on_log(self, run: Run) -> None:
        """Check the losses since the last log point or save.

        Raises:
            ConfigError: The training step does not return the metric.
            DivergenceError: There was a spike.
        """
        self._judge()

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
        """Return the losses of the window."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the next fit continues from there."""
        self._reset()
        self._losses.extend(float(each) for each in state["losses"])
        self._loaded = True

    # Losses.

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

    def _judge(self) -> None:
        """Judge the steps since the last call; all ranks judge the same numbers.

        Raises:
            DivergenceError: One of them is a spike.
        """
        pending, self._pending = self._pending, []
        names = {name for _, rows in pending for row_names, _, _ in rows for name in row_names}
        if names and self.metric not in names:
            raise ConfigError(f"LossSpike(metric={self.metric!r}). {nearest(self.metric, names)}")
        for step, loss in self._of_steps(pending) if pending else ():
            far = self._deviations(loss)
            if far <= self.threshold:
                self._losses.append(loss)
                continue
            assert self._run is not None
            self._run.stopping.restart_is_pointless = True
            raise DivergenceError(
                f"a spike at step {step}: {self._describe(loss, far)}. No checkpoint contains it. Resume with"
                " fit(..., skip='20 steps'), which leaves out the data of as many steps after the checkpoint,"
                " or with a lower learning rate and fit(..., optimizer_settings='program')"
            )

    def _describe(self, loss: float, far: float) -> str:
        if not math.isfinite(loss):
            return f"{self.metric} is {loss}"
        middle = median(self._losses)
        return f"{self.metric} is {loss:.6g}, {far:.3g} deviations above the median {middle:.6g}"
