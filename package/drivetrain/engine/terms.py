"""The further terms of a loss, each of which has a denominator of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Term
from drivetrain.data import MicroBatch
from drivetrain.distributed.ranks import ALONE
from drivetrain.engine.context import StepContext
from drivetrain.engine.metrics.means import Row
from drivetrain.engine.placeholder import has_zero_weight
from drivetrain.engine.weighting import Weighted
from drivetrain.strategies.zero_gradients import zero_gradients
from drivetrain.task.output import StepValues, no_loss, read_output, wide_dtype
from drivetrain.task.without_trace import without_trace

_Terms = Mapping[str, Term]


def term_rows(terms: _Terms) -> list[Row]:
    """Return the scalars of terms, each with its own weight; a weight on an accelerator is not read."""
    return [((name,), term.value.detach(), _weight(name, term.weight)) for name, term in terms.items()]


def _weight(name: str, given: float | Tensor) -> float | Tensor:
    if isinstance(given, Tensor) and given.device.type != "cpu":
        return given
    weight = float(given)
    if not 0 <= weight < math.inf:
        raise ConfigError(
            f"Term(weight=...) of {name!r} counts what its value is a mean over, such as tokens: a finite"
            f" number, 0 or more, not {weight}"
        )
    return weight


def accumulate_terms(
    engine: StepContext,
    weighted_batches: Weighted,
    left_out: Iterable[MicroBatch],
    read: StepValues,
    before: Sequence[Row],
) -> tuple[list[Row], list[Any]]:
    """Run forward and backward of each micro-batch of a window whose loss has terms; see `Engine.accumulate`.

    A micro-batch whose loss has weight zero is not left out, because its terms may have a weight.

    Args:
        engine: The engine.
        weighted_batches: The micro-batches with their factors.
        left_out: Micro-batches of the window; those whose loss has weight zero run last.
        read: The values of the first micro-batch, whose forward has run.
        before: The scalars of micro-batches before that, which had no terms; there must be none.
    """
    empty = [each for each in left_out if has_zero_weight(each) and not each.bad]
    pairs: Weighted = [*weighted_batches, *((each._replace(is_placeholder=True), 0.0) for each in empty)]
    window = TermWindow(engine, None if before else read[5], [each for each, _ in pairs[1:]])
    rows: list[Row] = []
    metric_inputs: list[Any] = []
    for number, (each, factor) in enumerate(pairs):
        micro_batch = engine.transfer.moved(each)
        if number:
            engine.passes += 1
            engine.strategy.microbatch(engine.model, number + 1 >= len(weighted_batches))
            read = read_output(engine.run_step(micro_batch.batch))
        loss, names, values, outputs, media, terms = read
        if loss is None or values is None or not loss.requires_grad:
            raise no_loss(engine.task, read)
        rows += [(names, values, micro_batch.weight), *window.backward(loss, factor, terms, each.bad)]
        if each.is_placeholder:
            continue
        engine.media = media
        if engine.train_metrics is not None and outputs is not None:
            engine.show_metrics(outputs, micro_batch.batch, metric_inputs)
        if engine.micro_batch_end is not None:
            engine.micro_batch_end(micro_batch.batch, outputs)
    return rows, metric_inputs


class TermWindow:
    """The terms of one window, and the sums of their weights over its micro-batches and all ranks.

    A term's weight is known after the forward, and the sum is needed before the first backward. So the other
    micro-batches of the window run a forward without gradients first, which leaves no trace. A window of one
    micro-batch needs none.

    Args:
        first: The terms of the window's first micro-batch.
        others: The other micro-batches, in the order of their turns.
    """

    def __init__(self, engine: StepContext, first: _Terms | None, others: Sequence[MicroBatch]) -> None:
        ranks, device = engine.sharing or ALONE, engine.strategy.device
        if engine.begins_again and ranks.size > 1:
            raise ConfigError(
                "micro_batch='auto' on several ranks, with a loss that has a Term: the ranks add up its"
                " weights before the backward, and one that has run out of memory cannot. Give micro_batch a"
                " number"
            )
        self._strategy, self._names = engine.strategy, [*(first or ())]
        rows = [self._rows(first)]
        with torch.no_grad(), without_trace(engine.task, device=device) if others else nullcontext():
            for each in others:
                batch = engine.transfer.moved(each).batch
                rows.append(self._rows(read_output(engine.run_step(batch))[5], each.bad))
        columns = [[weight for _, _, weight in column] for column in zip(*rows, strict=True)]
        engine.ranks.order.note(f"adds up the weights of the terms {self._names}")
        self._factors: Sequence[float | Tensor]
        if device.type == "cpu":
            totals = ranks.total([sum(map(float, column)) for column in columns])
            self._factors = [ranks.size / each if each else 0.0 for each in totals]
        else:
            zero = torch.zeros((), dtype=wide_dtype(device), device=device)
            summed = ranks.add(torch.stack([sum(column, zero) for column in columns]))
            self._factors = torch.where(summed == 0, 0.0, ranks.size / summed).unbind()

    def _rows(self, terms: _Terms | None, bad: bool = False) -> list[Row]:
        """Return the scalars of a micro-batch's terms; their weight is 0 if it could not be made."""
        if (names := [*(terms or ())]) != self._names:
            raise ConfigError(
                f"a step returned the terms {names}, and the window's first micro-batch {self._names}. Return"
                " the same terms in the same order from each micro-batch; Term(0.0, weight=0) has no effect"
            )
        rows = term_rows(terms or {})
        return [(name, value, 0.0) for name, value, _ in rows] if bad else rows

    def backward(
        self, loss: Tensor, factor: float | Tensor | None, terms: _Terms | None, bad: bool
    ) -> list[Row]:
        """Run backward of a micro-batch's loss and terms; return the scalars of the terms.

        A value whose weight is zero takes part without gradients, because it is usually 0 / 0.
        """
        rows = self._rows(terms, bad)
        parts = [(loss, 1.0 if factor is None else factor)]
        for (_, _, weight), part, each in zip(rows, self._factors, (terms or {}).values(), strict=True):
            parts.append((each.value, each.scale * weight * part))
        empty = [value for value, part in parts if not isinstance(part, Tensor) and not part]
        kept = [value for value, part in parts if isinstance(part, Tensor) or part]
        objective: Any = sum(value * part for value, part in parts)
        with zero_gradients(*empty, but=kept) if empty else nullcontext():
            self._strategy.backward(objective)
        return rows
