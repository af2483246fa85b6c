"""The window of one update: how its micro-batches are weighted, and how generator steps are read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.data import Everywhere, MicroBatch, Transfer, to_host
from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import ConfigError, nearest
from drivetrain.kept_buffers import KeptBuffers
from drivetrain.metrics import MetricBuffer, Row
from drivetrain.step_output import read_output
from drivetrain.types import Batch, StepOutput

if TYPE_CHECKING:
    from drivetrain.engine import Engine

Weighted = list[tuple[MicroBatch, float | Tensor | None]]


def weighted(micro_batches: Sequence[MicroBatch]) -> Weighted:
    """Each micro-batch with its share of the window's weight; None stands for the whole.

    One whose weight is zero is left out: it has nothing to learn from, and its mean loss is usually 0 / 0. A
    weight on an accelerator is not looked at, because that would wait for the device.
    """
    if len(micro_batches) == 1:
        weight = micro_batches[0].weight
        return [(micro_batches[0], None)] if isinstance(weight, Tensor) or weight else []
    kept = [each for each in micro_batches if isinstance(each.weight, Tensor) or each.weight]
    total = sum(each.weight for each in kept)
    return [(each, each.weight / total) for each in kept]


def shared(micro_batches: Sequence[MicroBatch], ranks: Ranks, spare: Spare) -> tuple[Weighted, Everywhere]:
    """As `weighted`, for a window of which other processes have micro-batches too.

    Strategies average gradients over the processes, so that each share is of the window's weight everywhere,
    times their number. None is left out, as all processes must go through the same number of micro-batches,
    unless the whole window weighs nothing.

    Returns:
        The micro-batches with their shares, and the window's counts in all processes together.
    """
    if len(micro_batches) == 1 and micro_batches[0].everywhere is not None:
        total = micro_batches[0].everywhere
    elif None not in (known := [each.everywhere for each in micro_batches]):
        total = Everywhere(*map(sum, zip(*known, strict=True)))
    else:
        # Those without weight come last: what is run in their place draws after all others, so that a resumed
        # run, in which it may be another batch, draws the same for these.
        micro_batches = sorted(micro_batches, key=_weighs_nothing)
        total = _asked(micro_batches, ranks, spare)
    if not isinstance(total.weight, Tensor) and not total.weight:
        return [], total
    size, weight = ranks.size, total.weight
    if isinstance(weight, Tensor):
        return [(each, each.weight * size / weight) for each in micro_batches], total
    pairs: Weighted = []
    for each in micro_batches:
        share = each.weight * size / weight
        pairs.append((each, None if share == 1 else share))
    return pairs, total


def _weighs_nothing(micro_batch: MicroBatch) -> bool:
    # A weight on an accelerator is not looked at.
    return not isinstance(micro_batch.weight, Tensor) and not micro_batch.weight


def _asked(micro_batches: Sequence[MicroBatch], ranks: Ranks, spare: Spare) -> Everywhere:
    weights = [each.weight for each in micro_batches]
    on_device = next((each.device for each in weights if isinstance(each, Tensor)), None)
    counts = [sum(each.samples for each in micro_batches), sum(each.tokens for each in micro_batches)]
    if on_device is None:
        lacks = spare.lacks(micro_batches)
        own = sum(each.bad for each in micro_batches)
        weight, samples, tokens, lacking, bad = ranks.total([sum(map(float, weights)), *counts, lacks, own])
        spare.bad = int(bad)
        if weight and lacking:
            spare.borrow(micro_batches, ranks)
        return Everywhere(weight, int(samples), int(tokens))
    summed = torch.stack([torch.as_tensor(each, device=on_device) for each in weights]).sum()
    ranks.add(summed)
    samples, tokens = ranks.total(counts)
    return Everywhere(summed, int(samples), int(tokens))


class Spare:
    """What is run in the place of a micro-batch without weight, where all processes run each of them.

    Args:
        transfer: Brings a batch to the device.

    Attributes:
        bad: How many micro-batches of the last window could not be made, in all processes.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.bad = 0
        self._transfer = transfer
        self._held: MicroBatch | None = None
        self._buffers = KeptBuffers()

    def lacks(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether nothing here weighed something yet, in this window or before."""
        return self._held is None and all(map(_weighs_nothing, micro_batches))

    def borrow(self, micro_batches: Sequence[MicroBatch], ranks: Ranks) -> None:
        """Take another process's where there is none; to be called by all processes, of which one has one."""
        first = micro_batches[0]
        mine = None if _weighs_nothing(first) else to_host(first.batch if first.host is None else first.host)
        batches = [each for each in ranks.all_gather(mine) if each is not None]
        if self._held is None:
            self._held = MicroBatch(self._transfer(batches[0]), 1.0, host=batches[0])

    def instead_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch, or what weighed something before if it has no weight itself.

        The mean loss over nothing is usually 0 / 0, of which no share is zero.
        """
        if isinstance(micro_batch.weight, Tensor) or micro_batch.everywhere is not None:
            return micro_batch
        if micro_batch.weight:
            self._held = micro_batch
            return micro_batch
        held = micro_batch if self._held is None else self._held
        return micro_batch._replace(batch=held.batch, host=held.host, stand_in=True)

    def drop(self) -> None:
        """Hold nothing any more: an update was not made, perhaps for what is held, whose loss may be NaN."""
        self._held = None

    def run(self, engine: Engine, micro_batch: MicroBatch, share: float | Tensor | None) -> Row:
        """Forward and backward of a micro-batch that stands in, and its scalars.

        Raises:
            ConfigError: The step gave no loss to optimise.
        """
        with self.without_trace(engine):
            loss, names, values, _ = read_output(engine._run_step(micro_batch.batch))
            if loss is None or values is None or not loss.requires_grad:
                raise no_loss(engine.task, loss)
            engine.strategy.backward(loss, share)
        return names, values, micro_batch.weight

    @contextmanager
    def without_trace(self, engine: Engine) -> Iterator[None]:
        """Within it what stands in is run, of which nothing is to stay: which batch it is, and so whether its
        loss is finite, must not matter, and a resumed run may have another.

        Buffers are as they were before. Gradients are zeros before they are added to those of others, as a
        share of zero of NaN would be NaN; but for strategies that shard parameters and have gradients past
        autograd's leaves.
        """
        # The statistics of SyncBatchNorm are of all processes, which would not have them alike any more.
        self._buffers.keep(engine.task, but=nn.SyncBatchNorm)
        trained = [each for each in engine._parameters if each.requires_grad]
        handles = [each.register_hook(torch.zeros_like) for each in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for each in handles:
                each.remove()
            self._buffers.put_back(unseen=True)  # of a stand-in's graph nothing counts


def bad_batches(engine: Engine, micro_batches: Sequence[MicroBatch]) -> int:
    """How many micro-batches of the window of the last update could not be made, in all processes."""
    return sum(each.bad for each in micro_batches) if engine._alone else engine._spare.bad


def keep_for_metrics(engine: Engine, outputs: Any, batch: Batch, seen: list[Any]) -> None:
    """Show a micro-batch to the declared metrics; at the update's end, if it may not be made.

    Args:
        engine: The run's.
        outputs: What the task's step gave for them, or None.
        batch: The micro-batch.
        seen: Gets what is to be shown later.
    """
    if outputs is None:
        return
    with torch.no_grad():
        inputs = engine.task.metric_inputs(outputs, batch)
    if engine._scaled or engine.gate or (engine.splitter and engine.splitter.searches):
        seen.append(inputs)  # an update that is skipped or begun again must not move the averages
    else:
        engine._train_metrics.update(inputs)  # type: ignore[union-attr]


class StepResult:
    """What one update did.

    Attributes:
        rows: The scalars of its micro-batches.
        applied: False when the update was skipped (16-bit overflow, a window of weight zero, or a loss or
            gradient for which it was not to be made).
        grad_norm: The gradient's norm before clipping (0-d, on the device), or None without clipping.
        update: The update's number, from 0.
    """

    __slots__ = ("applied", "grad_norm", "rows", "update")

    def __init__(self, rows: list[Row], applied: bool, grad_norm: Tensor | None, update: int) -> None:
        self.rows = rows
        self.applied = applied
        self.grad_norm = grad_norm
        self.update = update

    @property
    def metrics(self) -> dict[str, float]:
        """The weighted means of the update's scalars; reading them waits for the device."""
        buffer = MetricBuffer()
        buffer.add(self.rows, self.update)
        return buffer.means()

    @property
    def loss(self) -> float:
        """The update's loss; reading it waits for the device.

        Raises:
            ConfigError: The task logs no "loss" (a generator step names its losses).
        """
        metrics = self.metrics
        if "loss" not in metrics:
            raise ConfigError(f"this step has no value 'loss'. {nearest('loss', metrics)}")
        return metrics["loss"]


class Returned:
    """The end of a generator step, with what it returned."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def advance(body: Generator[Any, None, Any]) -> Any:
    """Run a generator step to its next yield; what strategies wrap when the task's step is a generator."""
    try:
        return next(body)
    except StopIteration as end:
        return Returned(end.value)


def same_optimizer(yielded: Sequence[Any], names: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The optimizer that all micro-batches' bodies name, and their losses.

    Raises:
        ConfigError: A yield that is no `(name, loss)`, an unknown name, or bodies that disagree.
    """
    losses = []
    first: str | None = None
    for each in yielded:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)):
            raise ConfigError(
                "a generator training_step must yield an optimizer's name and its loss, as in `yield"
                f' "generator", loss`; it yielded a {type(each).__name__}'
            )
        name, loss = each
        if name not in names:
            raise ConfigError(f"training_step yielded the unknown optimizer {name!r}. {nearest(name, names)}")
        if first is not None and name != first:
            raise ConfigError(
                f"the micro-batches of one window yielded different optimizers ({first!r} and {name!r}); with"
                " accumulation every micro-batch must yield the same names in the same order"
            )
        first = name
        losses.append(loss)
    assert first is not None
    return first, losses


def named(optimizer: str, metric: str) -> str:
    """The name under which a yielded value is logged: `generator_loss`, or the metric's own name."""
    return f"{optimizer}_loss" if metric == "loss" else metric


def returned_rows(yielded: Sequence[Any], pairs: Weighted) -> list[Row]:
    """The scalars that generator steps returned at their end, if any.

    Raises:
        ConfigError: Some bodies ended and some did not, or they returned no mapping.
    """
    rows = []
    for each, (micro_batch, _) in zip(yielded, pairs, strict=True):
        if not isinstance(each, Returned):
            raise ConfigError(
                "with accumulation every micro-batch's training_step must yield the same number of times"
            )
        if each.value is None:
            continue
        if not isinstance(each.value, Mapping):
            raise ConfigError(
                f"a generator training_step returned a {type(each.value).__name__}; it may return a mapping"
                " of scalars to log"
            )
        _, names, values, _ = read_output(StepOutput(None, metrics=each.value))  # type: ignore[arg-type]
        if values is not None:
            rows.append((names, values, micro_batch.weight))
    return rows


def no_loss(task: object, loss: Tensor | None) -> ConfigError:
    """The error of a training step that returned nothing to optimise."""
    if loss is not None:
        return ConfigError(
            f"{type(task).__name__}.training_step returned a loss ({loss.dtype}) that depends on no"
            " parameter: it was detached, made without gradients, or is a whole number"
        )
    return ConfigError(
        f"{type(task).__name__}.training_step returned no loss; it must return a scalar, a mapping with"
        " 'loss', or a StepOutput"
    )
