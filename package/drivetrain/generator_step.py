"""The step of a task with several optimizers: a generator that yields a loss for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.data import Everywhere, MicroBatch
from drivetrain.errors import StrategyError
from drivetrain.metrics import Row
from drivetrain.step_output import read_output
from drivetrain.window import (
    Returned,
    StepResult,
    Weighted,
    keep_for_metrics,
    named,
    no_loss,
    returned_rows,
    same_optimizer,
)

if TYPE_CHECKING:
    from drivetrain.engine import Engine


def generator_step(
    engine: Engine, micro_batches: Sequence[MicroBatch], pairs: Weighted, total: Everywhere | None
) -> StepResult:
    """One update of a task whose step is a generator: forward, backward and step at each of its yields."""
    # All bodies of the window run side by side, so that each named update sees the whole window's
    # gradient.
    if not engine._alone:
        pairs = [(engine._spare.instead_of(micro_batch), scale) for micro_batch, scale in pairs]
    bodies = [engine.task.training_step(micro_batch.batch) for micro_batch, _ in pairs]
    rows: list[Row] = []
    seen: list[Any] = []
    dropped: list[Row] = []
    applied, norm = False, None
    while bodies:
        yielded = [
            _stood_in(engine, body) if micro_batch.stand_in else engine._run_step(body)
            for body, (micro_batch, _) in zip(bodies, pairs, strict=True)
        ]
        if any(isinstance(each, Returned) for each in yielded):
            returned = returned_rows(yielded, pairs)
            if dropped:  # they may be made of what was refused
                dropped += returned
            else:
                rows += returned
            break
        name, losses = same_optimizer(yielded, engine.updaters)
        updater = engine.updaters[name]
        own: list[Row] = []
        own_seen: list[Any] = []
        for value, (micro_batch, scale) in zip(losses, pairs, strict=True):
            loss, names, values, outputs = read_output(value)
            if loss is None or values is None or not loss.requires_grad:
                raise no_loss(engine.task, loss)
            # Only this optimizer's parameters get gradients, whatever else the loss depends on.
            if micro_batch.stand_in:
                with engine._spare.without_trace(engine):
                    engine.strategy.backward(loss, scale, updater.parameters)
            else:
                engine.strategy.backward(loss, scale, updater.parameters)
            own.append((tuple(named(name, each) for each in names), values, micro_batch.weight))
            if engine._train_metrics is not None and not micro_batch.stand_in:
                keep_for_metrics(engine, outputs, micro_batch.batch, own_seen)
        engine.strategy.synchronize(updater.parameters)
        try:
            stepped, norm = engine._update(updater, own)
        except StrategyError as error:
            raise StrategyError(f"optimizer {name!r}: {error}") from error
        applied = applied or stepped
        if stepped or engine.gate is None:
            rows += own
            seen += own_seen
            if engine.gate is not None:  # a refusal after this leaves what the step was made with
                engine.gate.begin()
        else:  # what was refused, of this optimizer alone perhaps, is in no average
            dropped += own
    result = engine._finish(micro_batches, rows, applied, norm, seen, total)
    result.rows = [*rows, *dropped]
    return result


def _stood_in(engine: Engine, body: Any) -> Any:
    with engine._spare.without_trace(engine):
        return engine._run_step(body)
