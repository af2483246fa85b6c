"""Training steps that return None: their batches count for nothing, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.engine.metrics.means import Row
from drivetrain.engine.weighting import Weighted


class Skipped:
    """The micro-batches of one step whose `training_step` returned None.

    Each gets a loss of zero. The ranks exchange the weights of these micro-batches while the
    last backward runs, and the gradients are then divided by the weight that is left. Sharded ranks exchange
    nothing, because such a step is refused there.

    Args:
        engine: The engine.
        weighted_batches: The micro-batches of this rank, with their shares.

    Attributes:
        is_last_skipped: Whether the last step returned None.
    """

    def __init__(self, engine: Any, weighted_batches: Weighted) -> None:
        self._strategy = engine.strategy
        self._engine = engine
        self._weighted_batches = weighted_batches
        self._ranks = None if engine.strategy.sharded else engine.sharing
        self._done = 0
        self._lost: list[int] = []  # the numbers of those that returned None
        self._sums: Tensor | None = None
        self._work: Any = None
        self.is_last_skipped = False

    def loss_of(self, loss: Tensor | None) -> Tensor:
        """Return the loss of the next micro-batch's step: its own, or zero if it returned None."""
        if self._ranks is None and loss is not None:
            self._done += 1
            self.is_last_skipped = False
            return loss
        self.is_last_skipped = loss is None
        if loss is None and not self._weighted_batches[self._done][0].is_placeholder:
            self._lost.append(self._done)
        self._done += 1
        if self._done == len(self._weighted_batches) and self._ranks is not None:
            self._sums = torch.tensor(self._own(), dtype=torch.float64)
            if self._ranks.copy:  # another rank has the same batch
                self._sums.zero_()
            self._work = torch.distributed.all_reduce(self._sums, group=self._ranks.group, async_op=True)
        return self._zero() if loss is None else loss

    def _zero(self) -> Tensor:
        """Return a loss of zero. The wrappers of several ranks wait for every gradient of every rank."""
        strategy = self._strategy
        if strategy.ranks.size == 1:  # without a gradient, which an optimizer would act on
            return torch.zeros((), device=strategy.device, requires_grad=True)
        if strategy.sharded:
            raise ConfigError(
                f"a training step returned None, which strategy {strategy.name!r} cannot skip: all ranks"
                " gather shards in each forward and backward. Return a loss of zero that depends on the"
                " outputs, leave such samples out of the data, or use 'ddp'"
            )
        parameters = self._engine.parameters
        return torch.stack([each.reshape(-1)[:0].sum().float() for each in parameters]).sum()

    def _own(self) -> list[float]:
        """Return the weights of this rank: of the skipped micro-batches, and of all."""
        lost = total = 0.0
        for number, (micro_batch, _) in enumerate(self._weighted_batches):
            if not micro_batch.is_placeholder:
                total += float(micro_batch.weight)
                lost += float(micro_batch.weight) if number in self._lost else 0.0
        return [lost, total]

    def left(self, step_values: list[Row], parameters: Sequence[Tensor]) -> list[Row] | None:
        """Make the gradients those of a step without the skipped micro-batches.

        Args:
            step_values: The scalars of all micro-batches.
            parameters: The trained parameters.

        Returns:
            The scalars of those that were not skipped; None if no rank has any.
        """
        if self._sums is None and not self._lost:
            return step_values
        if self._sums is not None:
            self._work.wait()
        lost, total = self._own() if self._sums is None else self._sums.tolist()
        if lost < total:
            if lost:
                self._strategy.scale_gradients(parameters, total / (total - lost))
            return [row for number, row in enumerate(step_values) if number not in self._lost]
        for parameter in parameters:  # of zeros
            parameter.grad = None
        return None
