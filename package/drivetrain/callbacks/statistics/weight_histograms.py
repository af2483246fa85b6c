"""Histograms of weights and gradients, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drivetrain.callbacks.statistics.log_points import LoggingCallback, LogPoints
from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name, count, flag, globs
from drivetrain.loggers.base import check_kind_taken
from drivetrain.loggers.media import BinCounts, Histogram
from drivetrain.strategies.base import check_supported
from drivetrain.task.optim.groups import select_parameters

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_CHUNK = 1 << 20
"""The number of values that are counted at once: what is computed from them stays in a CPU's cache."""


@by_name
class WeightHistograms(LoggingCallback):
    """Gives the loggers a histogram of each parameter, and by choice of its gradient, at log points.

    The names are "weights/<parameter>" and "gradients/<parameter>". The bins of a histogram are equally wide,
    from its smallest to its largest value, as those of `torch.histogram`. Each rank counts the values of its
    own shards; nothing is gathered, and the counts are those of one process.

    Weights are counted at the log point, after its step. Gradients are counted before they are clipped, in
    the steps that a log point may follow: few with `log_every` in steps or epochs, all with another
    interval. Counts stay on the device until the log point, except on XLA, whose `bincount` runs on the host.
    With gradients, a log point of a validation alone gets no histograms.

    The loggers "tensorboard" and "jsonl" take histograms, most experiment trackers do, and so does any logger
    with "histogram" in `takes`; see `drivetrain.loggers.MediaLogger`.

    Args:
        every: The least interval between two log points with histograms, in steps or whole epochs; None takes
            every log point.
        patterns: Globs on parameters' names; None takes all parameters that are trained.
        bins: The number of bins.
        gradients: Whether to make histograms of gradients too.

    Raises:
        ConfigError: An argument that is not allowed; when a Trainer is made: no logger takes histograms; at
            the start of a fit: a pattern matches no parameter.
        StrategyError: When a Trainer is made: a strategy that does not show its shards; with gradients,
            DeepSpeed, which keeps them.
    """

    def __init__(
        self,
        *,
        every: Interval | None = None,
        patterns: str | Sequence[str] | None = None,
        bins: int = 64,
        gradients: bool = False,
    ) -> None:
        self.patterns = globs("WeightHistograms(patterns=)", patterns)
        self.bins = count("WeightHistograms(bins=)", bins, at_least=1)
        self.gradients = flag("WeightHistograms(gradients=)", gradients)
        self._points = LogPoints("WeightHistograms(every=)", every)
        self._parameters: dict[str, nn.Parameter] = {}
        self._of_gradients: list[_Counts] = []
        self._taken_at = -1
        self._is_counted = False
        if not gradients:  # no hook reads gradients, so that they may be released early
            vars(self)["on_before_optimizer_step"] = super().on_before_optimizer_step

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that a logger takes histograms, and that each process knows its shards and their gradients.

        Raises:
            ConfigError: No logger takes histograms.
            StrategyError: The strategy does not show shards or gradients.
        """
        if trainer.dry_run in (None, "overfit"):  # a trial that writes nothing has no loggers
            check_kind_taken(trainer.loggers, "histogram", "WeightHistograms")
        instead = "Use another strategy, or leave the callback out"
        check_supported(strategy, "local_parts", "WeightHistograms", instead)
        if self.gradients:
            instead = "Use strategy 'ddp' or 'fsdp', or gradients=False"
            check_supported(strategy, "value_clipping", "WeightHistograms(gradients=True)", instead)

    def on_fit_start(self, run: Run) -> None:
        """Look up the parameters.

        Raises:
            ConfigError: A pattern matches no parameter, or a parameter is complex.
        """
        self._points.begin(run)
        self._of_gradients, self._is_counted = [], False
        found = select_parameters(run.task, None, self.patterns, "WeightHistograms(patterns=)")
        self._parameters = {each.names[0]: each.parameter for each in found}
        for name, each in self._parameters.items():
            if each.is_complex():
                raise ConfigError(
                    f"WeightHistograms: {name!r} is complex, and complex numbers have no order. Leave it out,"
                    " by patterns"
                )

    def on_before_optimizer_step(self, run: Run) -> None:
        """Count the gradients, on the device, if they may be logged."""
        if self._taken_at != run.progress.micro_batches:  # else another optimizer of the same step
            self._of_gradients, self._taken_at = [], run.progress.micro_batches
        self._is_counted = self._points.may_follow(run)
        if self._is_counted:
            trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
            parts = {name: _part_of_gradient(run, each) for name, each in trained.items()}
            self._of_gradients += [_Counts(run, parts, self.bins)] if parts else []

    def on_log(self, run: Run) -> None:
        """Count the weights, and give the loggers the histograms."""
        of_gradients, self._of_gradients = self._of_gradients, []
        is_counted, self._is_counted = self._is_counted, False
        if self.gradients and not is_counted:  # a log point of a validation alone, say
            return
        if not self._points.take(run):
            return
        parts = {
            name: run.engine.strategy.local_part(each)
            for name, each in self._parameters.items()
            if self.patterns is not None or each.requires_grad
        }
        of_weights = [_Counts(run, parts, self.bins)] if parts else []
        for kind, found in (("weights", of_weights), ("gradients", of_gradients)):
            for counts in found:
                for name, counted in counts.read():
                    run.log(f"{kind}/{name}", Histogram(counted))


def _part_of_gradient(run: Run, parameter: nn.Parameter) -> tuple[Tensor, float]:
    """Return this process's part of a gradient, and its share; nothing if it has none."""
    if parameter.grad is None:
        return parameter.new_empty(0), 1.0
    part, share = run.engine.strategy.local_part(parameter.grad)
    return part.coalesce().values() if part.is_sparse else part, share


class _Counts:
    """The counts of several tensors, on the device and equal on all ranks."""

    @torch.no_grad()
    def __init__(self, run: Run, parts: Mapping[str, tuple[Tensor, float]], bins: int) -> None:
        self._names = list(parts)
        ranks, device = run.engine.ranks, run.engine.device
        wide = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs lack
        # The smallest values with the opposite sign, so that one all-reduce finds both ends.
        ends = ranks.largest(torch.stack([_ends(each).to(device, wide) for each, _ in parts.values()]))
        low, high = -ends[:, 0], ends[:, 1]
        # A tensor of one value, or of none, gets bins around it, as in torch.histogram.
        low, high = torch.where(low > high, 0.0, low), torch.where(low > high, 0.0, high)
        margin = torch.where(low == high, 0.5, 0.0)
        outer = torch.stack([low - margin, high + margin], 1)
        rows = [
            _row(each, place, bins).to(device, wide) * share
            for place, (each, share) in zip(outer, parts.values(), strict=True)
        ]
        self._table = torch.cat([torch.stack([low, high], 1), outer, ranks.add(torch.stack(rows))], 1)

    def read(self) -> Iterator[tuple[str, BinCounts]]:
        """Yield each histogram, without those of nothing; waits for the device."""
        for name, row in zip(self._names, self._table.tolist(), strict=True):
            low, high, first, last, nonfinite, total, squares, *counts = row
            if not (nonfinite or any(counts)):
                continue
            bins = len(counts)
            edges = [first + (last - first) * number / bins for number in range(bins)]
            # Rounded, because a share of a third does not add up to the last bit.
            numbers = [round(each) for each in counts]
            yield name, BinCounts([*edges, last], numbers, low, high, total, squares, round(nonfinite))


def _chunks(part: Tensor) -> Iterator[Tensor]:
    for chunk in torch.split(part.reshape(-1), _CHUNK):
        yield chunk.to(torch.promote_types(chunk.dtype, torch.float32))


def _ends(part: Tensor) -> Tensor:
    """Return the smallest finite value with the opposite sign, and the largest; -inf if there is none."""
    inf = torch.inf
    ends = torch.full((2,), -inf, dtype=torch.promote_types(part.dtype, torch.float32), device=part.device)
    if not part.numel():
        return ends
    for chunk in _chunks(part):
        finite = chunk.isfinite()  # XLA's nan_to_num takes no infinite value
        largest = torch.where(finite, chunk, -inf).max()  # its amax() of no dimension reduces nothing
        smallest = torch.where(finite, chunk, inf).min()
        ends = torch.maximum(ends, torch.stack([-smallest, largest]))
    return ends


def _row(part: Tensor, outer: Tensor, bins: int) -> Tensor:
    """Return how many values are not finite, the sum, the sum of squares, and the counts by bin."""
    row = torch.zeros(3 + bins, dtype=outer.dtype, device=part.device)
    if not part.numel():
        return row
    for chunk in _chunks(part):
        low, high = outer.to(chunk)
        # torch.histogram's formula. The last edge gets the place `bins`, and a NaN gets `bins + 1`.
        place = ((chunk - low) * bins / (high - low)).nan_to_num_(bins + 1, bins + 1, bins + 1).int()
        if place.is_cuda:  # where bincount waits for the device
            slots = torch.histc(place, bins + 2, 0, bins + 2)
        else:
            slots = torch.bincount(place, minlength=bins + 2)
        finite = chunk.nan_to_num(0.0, 0.0, 0.0)
        row[0] += slots[bins + 1]
        row[1] += finite.sum()
        row[2] += torch.dot(finite, finite)
        row[3:] += slots[:bins]
        row[-1] += slots[bins]
    return row
