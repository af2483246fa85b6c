"""Statistics of modules' outputs: mean, standard deviation, extremes, and the share of zeros."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.callbacks.statistics.log_points import LoggingCallback, LogPoints
from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, globs, one_of
from drivetrain.strategies.transforms.compile import inside_compiled
from drivetrain.task.blocks import select_modules

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run

_LOG = logger(__name__)

STATISTICS = ("mean", "std", "min", "max", "zeros")
"""The values of `ActivationStats(statistics=)`."""

_COLUMN = {"std": "var"} | {each: each for each in STATISTICS if each != "std"}
"""What is measured for each statistic."""


@by_name
class ActivationStats(LoggingCallback):
    """Logs statistics of the outputs of modules in training, at log points.

    The names are "activations/<statistic>/<module>". Each is over all elements of the module's outputs in the
    last step, over all micro-batches and, by one exchange, all ranks. "std" divides by the number of
    elements, and "zeros" is the share that is exactly zero. Of a module that returns several tensors, the
    first of floating point counts. Outputs of 16 bits are reduced in float32.

    Modules have hooks only in the steps that a log point may follow. With `log_every` in steps or epochs
    these are few; with another interval it is every step. Numbers stay on the device until the log point.
    Recomputed forwards, placeholders of ranks without data, and validations do not count.

    Compiled code does not call hooks that are added inside of it: name the compiled module, or one around it.

    Args:
        patterns: Globs on modules' names; None takes all modules without children, and each compiled one.
        statistics: Some of "mean", "std", "min", "max" and "zeros".
        every: The least interval between two log points with statistics, in steps or whole epochs; None takes
            every log point.

    Raises:
        ConfigError: An argument that is not allowed; at the start of a fit: a pattern matches no module, or
            one inside of compiled code.
    """

    def __init__(
        self,
        *,
        patterns: str | Sequence[str] | None = None,
        statistics: Sequence[str] = ("mean", "std", "max", "zeros"),
        every: Interval | None = None,
    ) -> None:
        self.patterns = globs("ActivationStats(patterns=)", patterns)
        given = (statistics,) if isinstance(statistics, str) else statistics
        if not isinstance(given, Collection) or not given:
            raise ConfigError(f"ActivationStats(statistics={statistics!r}): give some of {STATISTICS}")
        self.statistics = tuple(one_of("statistic of ActivationStats", each, STATISTICS) for each in given)
        self._columns = tuple(
            column
            for columns in (("mean", "var"), ("min",), ("max",), ("zeros",))
            if any(_COLUMN[each] in columns for each in self.statistics)
            for column in columns
        )
        self._points = LogPoints("ActivationStats(every=)", every)
        self._modules: dict[str, nn.Module] = {}
        self._calls: dict[str, list[tuple[int, Tensor]]] = {}  # the number of elements, and the columns
        self._handles: list[RemovableHandle] = []
        self._is_measured = self._has_warned = False

    def on_fit_start(self, run: Run) -> None:
        """Look up the modules.

        Raises:
            ConfigError: A pattern matches no module, or one inside of compiled code.
        """
        self._points.begin(run)
        self._forget()
        self._is_measured = self._has_warned = False
        inside = inside_compiled(run.task)
        found = select_modules(run.task, self.patterns or ("*",), "ActivationStats(patterns=)")
        seen = {name: each for name, each in found.items() if each not in inside}
        if self.patterns is None:
            outer = {each for each in seen.values() if all(child in inside for child in each.children())}
            seen = {name: each for name, each in seen.items() if each in outer}
        elif len(seen) < len(found):
            name = next(name for name, each in found.items() if each in inside)
            raise ConfigError(
                f"ActivationStats: {name!r} is inside of compiled code, which may not call its hook. Name the"
                f" compiled module or one around it ({', '.join(map(repr, seen)) or 'none matches'}), or use"
                " compile=False"
            )
        self._modules = seen
        if run.engine.splitter is not None:  # an attempt that ran out of memory does not count
            run.engine.splitter.begun_again.append(self._drop)

    def on_step_start(self, run: Run) -> None:
        """Install the hooks, if the step may be logged."""
        self._forget()
        self._is_measured = self._points.may_follow(run)
        if self._is_measured:
            for name, module in self._modules.items():
                self._handles.append(module.register_forward_hook(partial(self._measure, run, name)))

    def on_step_end(self, run: Run) -> None:
        """Remove the hooks; forget a step that was skipped."""
        self._remove()
        if run.result is not None and not run.result.applied:
            self._forget()
            self._is_measured = False

    def on_log(self, run: Run) -> None:
        """Log the statistics of the last step."""
        is_measured, self._is_measured = self._is_measured, False
        if not is_measured or not self._points.take(run):
            return
        mine = self._read(run.engine.device)
        self._forget()
        of_all = run.engine.ranks.gather_first(mine)
        if of_all is None:
            return
        without = []
        for name in self._modules:
            found = [each[name] for each in of_all if name in each]
            if found:
                self._log(run, name, _joined(torch.stack(found), self._columns))
            else:
                without.append(name)
        if self.patterns is not None and without and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                f"ActivationStats: in step {run.progress.steps} no tensor of floating point came out of"
                f" {', '.join(map(repr, without))}, which therefore has no statistics"
            )

    def _log(self, run: Run, name: str, joined: Tensor) -> None:
        values = dict(zip(self._columns, joined.tolist()[1:], strict=True))
        if "var" in values:
            values["std"] = math.sqrt(values["var"])
        for each in self.statistics:
            run.log(f"activations/{each}/{name}", values[each])

    def on_fit_end(self, run: Run) -> None:
        """Remove the hooks."""
        self._end(run)

    def on_exception(self, run: Run) -> None:
        """Remove the hooks."""
        self._end(run)

    def _end(self, run: Run) -> None:
        self._forget()
        self._modules = {}
        splitter = run.engine.splitter
        if splitter is not None and self._drop in splitter.begun_again:
            splitter.begun_again.remove(self._drop)

    # The measurements.

    def _forget(self) -> None:
        self._remove()
        self._drop()

    def _remove(self) -> None:
        for each in self._handles:
            each.remove()
        self._handles = []

    def _drop(self) -> None:
        self._calls = {}

    def _measure(self, run: Run, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # The number of the backward in progress: it recomputes a forward, which has been measured.
        if torch._C._current_graph_task_id() != -1 or run.engine.placeholders.is_running:
            return
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.is_floating_point():
                if each.numel():
                    self._calls.setdefault(name, []).append((each.numel(), self._row(each.detach())))
                return

    @torch.no_grad()
    def _row(self, output: Any) -> Tensor:
        """Return the values of the columns, on the device."""
        whole = output.full_tensor() if hasattr(output, "full_tensor") else output
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
        values: list[Tensor] = []
        if "var" in self._columns:
            values += reversed(torch.var_mean(wide, correction=0))
        if "min" in self._columns:
            values.append(wide.min())
        if "max" in self._columns:
            values.append(wide.max())
        if "zeros" in self._columns:
            values.append((wide == 0).sum().to(wide.dtype) / wide.numel())
        return torch.stack(values)

    def _read(self, device: torch.device) -> dict[str, Tensor]:
        """Return each module's number of elements and the columns, on the host; one wait for the device."""
        rows = [row.to(device) for calls in self._calls.values() for _, row in calls]
        table = torch.stack(rows).cpu().double() if rows else torch.empty(0)
        found, start = {}, 0
        for name, calls in self._calls.items():
            counts = torch.tensor([[count] for count, _ in calls], dtype=torch.float64)
            found[name] = _joined(torch.cat([counts, table[start : start + len(calls)]], 1), self._columns)
            start += len(calls)
        return found


def _joined(table: Tensor, columns: Sequence[str]) -> Tensor:
    """Join rows of parts into the row of the whole.

    The variance is that of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances" (1979), which loses no digits where the mean is far from zero.

    Args:
        table: A row for each part: its number of elements, then the columns.
        columns: The names of the columns.
    """
    counts = table[:, 0]
    shares = counts / counts.sum()
    values = dict(zip(columns, table[:, 1:].unbind(1), strict=True))
    joined = {}
    for name, each in values.items():
        if name == "min":
            joined[name] = each.amin()
        elif name == "max":
            joined[name] = each.amax()
        elif name == "var":
            mean = (shares * values["mean"]).sum()
            joined[name] = (shares * (each + (values["mean"] - mean).square())).sum()
        else:
            joined[name] = (shares * each).sum()
    return torch.stack([counts.sum(), *joined.values()])
