"""The step of a task with several optimizers: a generator that yields a loss for each."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from drivetrain.core.errors import ConfigError, StrategyError, nearest
from drivetrain.core.types import StepOutput
from drivetrain.engine.context import StepContext
from drivetrain.engine.metrics.means import Row
from drivetrain.engine.weighting import Weighted
from drivetrain.task.output import Optimized, no_loss, read_output


def generator_step(engine: StepContext, weighted_batches: Weighted) -> Optimized:
    """Make one step of a generator task: forward, backward and an optimizer's step at each yield."""
    # All bodies of the window run side by side, so that each named optimizer gets the whole window's
    # gradient.
    weighted_batches = list(engine.transfer.moving(weighted_batches))
    bodies = [engine.task.training_step(micro_batch.batch) for micro_batch, _ in weighted_batches]
    step_values: list[Row] = []
    metric_inputs: list[Any] = []
    dropped: list[Row] = []
    engine.media = None
    applied, norm = False, None
    while bodies:
        engine.passes += 1
        yielded = _forward(engine, bodies, weighted_batches)
        if any(isinstance(each, Returned) for each in yielded):
            engine.ranks.order.note("ends the step")
            returned = returned_rows(yielded, weighted_batches)
            if dropped:  # they may depend on the skipped step
                dropped += returned
            else:
                step_values += returned
            break
        name, losses = same_optimizer(yielded, engine.updaters)
        updater = engine.updaters[name]
        engine.ranks.order.note(f"steps optimizer {name!r}")
        own, own_inputs = _backward(engine, name, losses, weighted_batches)
        engine.strategy.synchronize(updater.parameters)
        try:
            stepped, norm = engine.update(updater, own, engine.parameters)
        except StrategyError as error:
            raise StrategyError(f"optimizer {name!r}: {error}") from error
        applied = applied or stepped
        if stepped or engine.gate is None:
            step_values += own
            metric_inputs += own_inputs
            if engine.gate is not None:  # after this, a skip keeps the buffers of this step
                engine.gate.begin()
        else:  # a skipped step, perhaps of this optimizer alone, enters no average
            dropped += own
    return Optimized(step_values, applied, norm, metric_inputs, dropped)


def _forward(engine: StepContext, bodies: Sequence[Any], weighted_batches: Weighted) -> list[Any]:
    """Run each micro-batch's body to its next yield."""
    return [
        engine.placeholders.forward(engine.task, engine.run_step, body)
        if micro_batch.is_placeholder
        else engine.run_step(body)
        for body, (micro_batch, _) in zip(bodies, weighted_batches, strict=True)
    ]


def _backward(
    engine: StepContext, name: str, losses: Sequence[Any], weighted_batches: Weighted
) -> tuple[list[Row], list[Any]]:
    """Run backward for one optimizer's losses; return its scalars, and the inputs of metrics."""
    step_values: list[Row] = []
    metric_inputs: list[Any] = []
    parameters = engine.updaters[name].parameters
    for value, (micro_batch, factor) in zip(losses, weighted_batches, strict=True):
        read = read_output(value)
        loss, names, values, outputs, media, terms = read
        if loss is None or values is None or terms is not None or not loss.requires_grad:
            raise no_loss(engine.task, read)
        if media is not None:
            engine.media = {**(engine.media or {}), **media}
        step_values.append((tuple(named(name, each) for each in names), values, micro_batch.weight))
        # Only this optimizer's parameters get gradients, whatever else the loss depends on.
        if micro_batch.is_placeholder:
            engine.placeholders.backward(engine.task, engine.strategy, loss, factor, parameters)
            continue
        engine.strategy.backward(loss, factor, parameters)
        if engine.train_metrics is not None and outputs is not None:
            engine.show_metrics(outputs, micro_batch.batch, metric_inputs)
        if engine.micro_batch_end is not None:
            engine.micro_batch_end(micro_batch.batch, outputs)
    return step_values, metric_inputs


class Returned:
    """The end of a generator step, with its return value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def advance(body: Generator[Any, None, Any]) -> Any:
    """Run a generator step to its next yield; strategies wrap this if `training_step` is a generator."""
    try:
        return next(body)
    except StopIteration as end:
        return Returned(end.value)


def same_optimizer(yielded: Sequence[Any], names: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the optimizer that all micro-batches' generators name, and their losses."""
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
    """Return the name under which a yielded value is logged: `generator_loss`, or the metric's own name."""
    return f"{optimizer}_loss" if metric == "loss" else metric


def returned_rows(yielded: Sequence[Any], weighted_batches: Weighted) -> list[Row]:
    """Return the scalars that generator steps returned at their end, if any."""
    step_values = []
    for each, (micro_batch, _) in zip(yielded, weighted_batches, strict=True):
        if not isinstance(each, Returned):
            raise ConfigError("with accumulation every training_step must yield the same number of times")
        if each.value is None:
            continue
        if not isinstance(each.value, Mapping):
            raise ConfigError(
                f"a generator training_step returned a {type(each.value).__name__}; it may return a mapping"
                " of scalars to log"
            )
        _, names, values, *_ = read_output(StepOutput(None, metrics=each.value))  # type: ignore[arg-type]
        if values is not None:
            step_values.append((names, values, micro_batch.weight))
    return step_values
