"""The window of one update: how its micro-batches are weighted, and how generator steps are read."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.data import MicroBatch
from drivetrain.errors import ConfigError, nearest
from drivetrain.metrics import MetricBuffer, Row, read_output
from drivetrain.types import StepOutput

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


class StepResult:
    """What one update did.

    Attributes:
        rows: The scalars of its micro-batches.
        applied: False when the update was skipped (16-bit overflow, or a window of weight zero).
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
