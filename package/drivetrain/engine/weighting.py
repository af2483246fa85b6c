"""The window of one step: the weights of its micro-batches, and the result of the step.

The gradient of a window is sum(weight x loss) / sum(weight), over its micro-batches and all ranks. If the
weights are known before the first backward, as in a Trainer, each backward gets its factor, its part of the
sum. Your own loop does not know them: its window is scaled when it is closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.data import GlobalCounts, MicroBatch
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.engine.metrics.means import MetricBuffer, Row
from drivetrain.engine.placeholder import Placeholders, has_zero_weight
from drivetrain.strategies import Strategy
from drivetrain.strategies.zero_gradients import zero_gradients

Weighted = list[tuple[MicroBatch, float | Tensor | None]]
"""Micro-batches with their factors; None means 1."""


def weigh(
    micro_batches: Sequence[MicroBatch], ranks: Ranks | None, placeholders: Placeholders, sums: bool = False
) -> tuple[Weighted, GlobalCounts | None]:
    """Give each micro-batch of a window its factor, its part of the window's weight.

    A micro-batch of weight zero has nothing to learn from, and its mean loss is usually 0 / 0. A single
    process leaves it out. Several ranks run a placeholder for it, because all must run the same number of
    micro-batches, unless the whole window has weight zero. A weight on an accelerator is not read, because
    that would wait for the device.

    Args:
        ranks: The ranks that make the step together; None for one process.
        sums: Whether the gradient is that of the window's sum, and not divided by the window's weight.

    Returns:
        The micro-batches with their factors, times the number of ranks, because strategies average over
        ranks; and the window's counts on all ranks together, None for one process.
    """
    if ranks is not None:
        return _weigh_together(micro_batches, ranks, placeholders, sums)
    if len(micro_batches) == 1 and not sums:
        weight = micro_batches[0].weight
        return ([(micro_batches[0], None)] if isinstance(weight, Tensor) or weight else []), None
    kept = [each for each in micro_batches if isinstance(each.weight, Tensor) or each.weight]
    weight = 1 if sums else sum(each.weight for each in kept)
    return [(each, each.weight / weight) for each in kept], None


def _weigh_together(
    micro_batches: Sequence[MicroBatch], ranks: Ranks, placeholders: Placeholders, sums: bool
) -> tuple[Weighted, GlobalCounts | None]:
    """Give each micro-batch its factor in the step that several ranks make."""
    if len(micro_batches) == 1 and micro_batches[0].global_counts is not None:
        total = micro_batches[0].global_counts
    elif None not in (known := [each.global_counts for each in micro_batches]):
        total = GlobalCounts(*map(sum, zip(*known, strict=True)))
    else:
        # Placeholders come last: they draw after all others. A resumed run may use another batch as
        # placeholder, and still draws the same for the others.
        micro_batches = sorted(micro_batches, key=has_zero_weight)
        total = _asked(micro_batches, ranks, placeholders)
        micro_batches = placeholders.put_in(micro_batches)
    size, weight = ranks.size, total.weight
    if isinstance(weight, Tensor):
        return [(each, each.weight * size / weight) for each in micro_batches], total
    if not weight:
        return [], total
    weight = 1 if sums else weight
    weighted_batches: Weighted = []
    for each in micro_batches:
        factor = each.weight * size / weight
        weighted_batches.append((each, None if factor == 1 else factor))
    return weighted_batches, total


def _asked(micro_batches: Sequence[MicroBatch], ranks: Ranks, placeholders: Placeholders) -> GlobalCounts:
    weights = [each.weight for each in micro_batches]
    on_device = next((each.device for each in weights if isinstance(each, Tensor)), None)
    counts = [sum(each.samples for each in micro_batches), sum(each.tokens for each in micro_batches)]
    if on_device is None:
        lacking = placeholders.lacking(micro_batches)
        own = sum(each.bad for each in micro_batches)
        weight, samples, tokens, lack, bad = ranks.total([sum(map(float, weights)), *counts, lacking, own])
        placeholders.bad = int(bad)
        if weight and lack:
            placeholders.borrow(micro_batches, ranks)
        return GlobalCounts(weight, int(samples), int(tokens))
    # `torch.full` waits for nothing, as a number's copy from the host would.
    placed = [
        each if isinstance(each, Tensor) else torch.full((), each, device=on_device) for each in weights
    ]
    summed = torch.stack(placed).sum()
    ranks.add(summed)
    samples, tokens = ranks.total(counts)
    return GlobalCounts(summed, int(samples), int(tokens))


class OpenWindow:
    """Accumulates sum(weight x loss) / sum(weight) over backwards, when any backward may be the last.

    Gradients are kept relative to the first weight, so that a window of one backward, the usual one, is never
    rescaled. With several ranks it is rescaled, because each has other weights.

    Attributes:
        handed: The current batch of the training data, or None.
        optimizers: The optimizers of the loop. Each may make one step from a window.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self.handed: MicroBatch | None = None
        self.optimizers: list[Optimizer] = []
        self._open = False  # whether backwards wait for a step
        self._first: float | Tensor | None = None
        self._total: float | Tensor = 0.0
        self._factor: float | Tensor | None = None
        self._done: list[Optimizer] = []  # those that have made their step from the last window
        self._is_over = True  # whether no other one may

    def _begin(self) -> None:
        """Open a window, without the gradients that the last one has left in the parameters of others."""
        self._open, self._first, self._total = True, None, 0.0
        self._done, self._is_over = [], False
        if len(self.optimizers) > 1:
            for each in self.optimizers:
                each.zero_grad()

    def _own(self, weight: float | Tensor | None) -> float | Tensor:
        """Return the given weight, or the weight of the current batch; a placeholder for a batch that this
        rank lacks has weight zero.
        """
        if self.handed is not None and self.handed.is_placeholder:
            return 0.0
        if weight is None:
            return self.handed.samples if self.handed is not None and self._ranks.size > 1 else 1.0
        return weight

    def backward(self, strategy: Strategy, loss: Tensor, weight: float | Tensor | None) -> None:
        """Add a micro-batch's gradients, unless its weight is zero: its mean loss is then usually 0 / 0."""
        if loss.is_complex():
            raise ConfigError(
                f"engine.backward(loss): the loss is complex ({loss.dtype}), and only a real number can be"
                " optimised. Give its .abs() or its .real"
            )
        weight = self._own(weight)
        if not isinstance(weight, Tensor) or weight.device.type == "cpu":  # reading another would wait for it
            weight = float(weight)
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"engine.backward(loss, weight): a weight counts samples or tokens, not {weight}"
                )
        if not self._open:
            self._begin()
        if self._ranks.size > 1:
            self._first = 1.0
            self._total = self._total + weight
            if isinstance(weight, Tensor) or weight:
                strategy.backward(loss, weight)
            else:  # a placeholder, or a mean over nothing: all ranks go through backward together
                with zero_gradients(loss):
                    strategy.backward(loss, weight)
            return
        if not isinstance(weight, Tensor) and weight == 0:
            return
        if self._first is None:
            self._first = self._total = weight
            strategy.backward(loss)
        else:
            self._total = self._total + weight
            strategy.backward(loss, weight / self._first)

    def _of_all(self, total: float | Tensor, device: torch.device) -> float | Tensor:
        """Return the sum over all ranks, on the device if that is none of the host's.

        A rank with a placeholder has a number where others have a tensor, so the device decides, and not the
        value.
        """
        if device.type == "cpu":
            return self._ranks.total([float(total)])[0]
        if isinstance(total, Tensor):
            return self._ranks.add(total.to(device, torch.float64))
        return self._ranks.add(torch.full((), total, dtype=torch.float64, device=device))

    def check_closed(self) -> None:
        """Check that the window is closed, so that the state can be saved; no other optimizer may step."""
        if self._open:
            raise ConfigError("engine.save() between engine.backward() and engine.step(): step first")
        self._is_over = True

    def close(self, strategy: Strategy, optimizer: Optimizer, apart: bool = True) -> None:
        """Divide the gradients of an optimizer by the window's weight; the next backward opens a new window.

        If every weight was zero, there are no gradients; optimizers skip parameters without a gradient.

        Args:
            apart: Whether optimizers may make their steps from one window one after another.
        """
        stepping = getattr(optimizer, "optimizers", (optimizer,))
        if not self._open and (self._is_over or any(each in self._done for each in stepping)):
            raise ConfigError(
                "engine.step() without engine.backward(loss) before it: there is no gradient. Each optimizer"
                " makes one step from a loss, before engine.save()"
            )
        if not self._open and not apart:
            raise ConfigError(
                "engine.step() of a second optimizer from one loss: with a loss scale, as of '16-mixed', they"
                " step together. Write engine.step([a, b])"
            )
        if self._open:
            self._open, self._factor = False, self._weight(strategy)
        self._done += stepping
        self.optimizers += (each for each in stepping if each not in self.optimizers)
        if self._factor is not None:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            strategy.scale_gradients(parameters, self._factor)

    def _weight(self, strategy: Strategy) -> float | Tensor | None:
        """Return the factor that makes the gradients a mean, on all ranks together; None for 1."""
        if self._first is None or self._total is self._first:
            return None
        total = self._total
        if self._ranks.size > 1:  # strategies average over the processes
            total = self._of_all(total, strategy.device) / self._ranks.size
        if isinstance(total, Tensor):  # to compare it here would wait for the device
            return torch.where(total != 0, self._first / total, 1.0)
        return self._first / total if total != 0 else None


class StepResult:
    """The result of one step.

    Attributes:
        step_values: The scalars of its micro-batches.
        applied: False when the step was skipped (16-bit overflow, a window of weight zero, or a loss or
            gradient that a policy refuses).
        grad_norm: The gradient's norm before clipping (0-d, on the device), or None without clipping.
        step: The step's number, from 0.
    """

    __slots__ = ("applied", "grad_norm", "step", "step_values")

    def __init__(self, step_values: list[Row], applied: bool, grad_norm: Tensor | None, step: int) -> None:
        self.step_values = step_values
        self.applied = applied
        self.grad_norm = grad_norm
        self.step = step

    @property
    def metrics(self) -> dict[str, float]:
        """The weighted means of the step's scalars; reading them waits for the device."""
        buffer = MetricBuffer()
        buffer.add(self.step_values, self.step)
        return buffer.means()

    @property
    def loss(self) -> float:
        """The step's loss; reading it waits for the device.

        Raises:
            ConfigError: The task logs no "loss" (a generator step names its losses).
        """
        metrics = self.metrics
        if "loss" not in metrics:
            raise ConfigError(f"this step has no value 'loss'. {nearest('loss', metrics)}")
        return metrics["loss"]
