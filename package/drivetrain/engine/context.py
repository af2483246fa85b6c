"""The interface between the engine and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from drivetrain.core.progress import Progress
from drivetrain.core.random_streams import Streams
from drivetrain.core.types import Batch
from drivetrain.data import GlobalCounts, MicroBatch, Transfer
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.metrics.declared import DeclaredMetrics
from drivetrain.engine.metrics.means import Row
from drivetrain.engine.placeholder import Placeholders
from drivetrain.engine.skip import StepGate
from drivetrain.engine.updater import Updater
from drivetrain.engine.weighting import StepResult, Weighted
from drivetrain.strategies import Strategy
from drivetrain.task.task import TaskModule


class StepContext(Protocol):
    """The engine as seen by the other files of this folder, which do not import it.

    Attributes:
        task: The task.
        model: The step module, wrapped by the strategy.
        run_step: Runs the task's training step on a micro-batch.
        evaluate_step: Runs the step of the evaluation in progress on a batch.
        strategy: The strategy.
        ranks: The ranks of the job.
        sharing: The ranks that share the micro-batches of a step; None if there is only one.
        sums: Whether the gradient of a step is that of the sum of its losses; see `weigh`.
        parameters: The trained parameters.
        updaters: The optimizers by name.
        optimizer: The only one of them, or all as one; see `Updater`.
        interleaved: Whether the training step is a generator that names its optimizers.
        train_metrics: The declared metrics of training, or None.
        placeholders: Runs micro-batches of weight zero without side effects.
        gate: Decides which steps are skipped, or None.
        streams: The random streams.
        transfer: Moves batches to the device.
        progress: The counts.
        micro_batch_end: Called with batch and outputs after each micro-batch's backward, or None.
        media: The values to show that the last micro-batch of the step returned, or None.
        passes: Forwards and backwards so far.
        begins_again: Whether a step may be repeated. A repetition must not update a metric twice.
    """

    task: TaskModule
    model: nn.Module
    run_step: Callable[..., Any]
    evaluate_step: Callable[..., Any]
    strategy: Strategy
    ranks: Ranks
    sharing: Ranks | None
    sums: bool
    parameters: list[nn.Parameter]
    updaters: dict[str, Updater]
    optimizer: Updater
    interleaved: bool
    train_metrics: DeclaredMetrics | None
    placeholders: Placeholders
    gate: StepGate | None
    streams: Streams
    transfer: Transfer
    progress: Progress
    micro_batch_end: Callable[[Batch, Any], None] | None
    media: Mapping[str, Any] | None
    passes: int
    begins_again: bool

    def accumulate(
        self, weighted_batches: Weighted, left_out: Iterable[MicroBatch] = ()
    ) -> tuple[list[Row], list[Any]]:
        """See `Engine.accumulate`."""

    def update(
        self, updater: Updater, step_values: Sequence[Row], parameters: Sequence[Tensor]
    ) -> tuple[bool, Tensor | None]:
        """See `Engine.update`."""

    def finish(
        self,
        micro_batches: Sequence[MicroBatch],
        step_values: list[Row],
        applied: bool,
        norm: Tensor | None,
        metric_inputs: list[Any],
        total: GlobalCounts | None,
    ) -> StepResult:
        """See `Engine.finish`."""

    def show_metrics(self, outputs: Any, batch: Batch, metric_inputs: list[Any]) -> None:
        """See `Engine.show_metrics`."""

    def synchronize_buffers(self) -> None:
        """See `Engine.synchronize_buffers`."""
