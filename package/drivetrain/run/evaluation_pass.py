"""The values of one pass over evaluation data: from what its steps return, with metrics and readers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

from torch import Tensor

from drivetrain.core.types import EvaluationReader
from drivetrain.data import MicroBatch
from drivetrain.engine.metrics.declared import joined
from drivetrain.engine.metrics.means import MetricBuffer
from drivetrain.engine.terms import term_rows
from drivetrain.run.run import Run
from drivetrain.task.output import StepValues


class EvaluationPass:
    """One pass over a loader: it takes what the steps return, and computes the values.

    Args:
        whole: Whether the pass is a whole one, for what computes from all samples at once.

    Attributes:
        add: Adds the scalars of a step; see `MetricBuffer.add`.
        reads: Whether something reads outputs, so that `read` must be called.
        needs_all: Whether rank 0 needs all samples, so that `end_round` must be called.
    """

    def __init__(self, run: Run, whole: bool, stack: ExitStack) -> None:
        engine, declared = run.engine, run.metrics_of(run.evaluation.loader)
        self._ranks = engine.data_ranks
        self._buffer = MetricBuffer(self._ranks)
        self.add = self._buffer.add
        self._evaluation = run.evaluation
        self._log_media = run.log_media
        self._metric_inputs = run.task.metric_inputs
        self._whole = whole
        self._declared = declared
        if declared:
            declared.reset()
            stack.callback(declared.reset)
        self._keeps_all = declared is not None and declared.reads_all and whole
        self._round = 0
        self._readers: list[EvaluationReader] = []
        for each in run.callbacks if whole else ():
            if (reader := each.evaluation_reader()) is not None:
                self._readers.append(stack.enter_context(closing(reader)))
        self._records: list[Any] = []
        self.reads = bool(declared or self._readers)
        self.needs_all = self._keeps_all or bool(self._readers)

    def take(self, micro_batch: MicroBatch, number: int, returned: StepValues) -> None:
        """Take what a step has returned for a batch."""
        loss, names, scalars, outputs, media, terms = returned
        if media is not None and number == 0:
            self._log_media(media)
        if scalars is not None:
            self.add([(names, scalars, micro_batch.weight)], number)
        if terms is not None:
            self.add(term_rows(terms), number)
        self.read(micro_batch, loss, outputs)

    def read(self, micro_batch: MicroBatch, loss: Tensor | None, outputs: Any) -> None:
        """Give the metrics and the readers what a step has returned."""
        if self._declared and outputs is not None:
            self._declared.update(self._metric_inputs(outputs, micro_batch.batch), self._round)
        if self._readers:
            loss = None if loss is None else loss.detach()
            self._records.append([each.record(loss, outputs, micro_batch.batch) for each in self._readers])

    def end_round(self) -> None:
        """Give rank 0 what needs all samples. In a global micro-batch the ranks have consecutive ones."""
        self._round += 1
        if self._keeps_all:
            self._declared.to_host()  # type: ignore[union-attr]
        if self._readers:
            records, self._records = self._records, []
            for of_rank in self._ranks.gather_first(records) or ():
                for of_batch in of_rank:
                    for reader, record in zip(self._readers, of_batch, strict=True):
                        reader.add(record)

    def values(self) -> dict[str, float]:
        """Return the values by the names that the task gives them; all ranks call it together."""
        # A loss that is NaN here is reported as NaN; a fit then does what `on_nonfinite` says.
        values = self._buffer.means(refuse_nonfinite=False)
        if self._declared:
            values = joined(values, self._declared.compute(self._whole))
            self._evaluation.results = self._declared.results
        for reader in self._readers:
            values = joined(values, self._ranks.first(lambda reader=reader: dict(reader.compute())))  # type: ignore[misc]
        return values
