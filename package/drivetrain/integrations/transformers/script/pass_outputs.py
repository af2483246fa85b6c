"""One pass of `evaluate` or `predict`: which outputs are wanted, and those that it gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import EvalPrediction, GenerationConfig
from transformers.trainer_utils import denumpify_detensorize

from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.metrics.arrays import joined
from drivetrain.integrations.transformers.evaluation import MetricsReader

Compute = Callable[..., Mapping[str, Any]]


class Pass:
    """A pass over evaluation data, as a script asks for it.

    Args:
        compute: The script's `compute_metrics`; None computes nothing.
        keeps: Whether to keep the outputs and labels.
        loss_only: Whether only the loss is wanted.
        ignored: The outputs to leave out; None leaves out what the model's configuration names.
        generation: The options of generation; None generates nothing.

    Attributes:
        predictions: The outputs of the whole set, if they are kept, on all ranks.
        label_ids: The labels, likewise.
        counts: The metrics that are whole numbers or truth values, of their types.
        samples: How many samples were read; on all ranks together, after `share`.
    """

    def __init__(
        self,
        compute: Compute | None,
        *,
        keeps: bool = False,
        loss_only: bool = False,
        ignored: list[str] | None = None,
        generation: GenerationConfig | None = None,
    ) -> None:
        self.compute = compute
        self.keeps = keeps
        self.loss_only = loss_only
        self.ignored = ignored
        self.generation = generation
        self.predictions: Any = None
        self.label_ids: Any = None
        self.counts: dict[str, int] = {}
        self.samples = 0

    def metrics_of(self, prediction: EvalPrediction, **options: Any) -> Mapping[str, Any]:
        """Call `compute_metrics`, unless the set has no labels, as transformers does."""
        if self.compute is None or prediction.label_ids is None:
            return {}
        found = self.compute(prediction, **options)
        if isinstance(found, Mapping):
            plain = denumpify_detensorize(dict(found))
            self.counts = {str(name): value for name, value in plain.items() if isinstance(value, int)}
        return found

    def share(self, ranks: Ranks) -> None:
        """Give all ranks what rank 0 has, and the number of samples; all call it together."""
        self.samples = int(ranks.total([self.samples])[0])
        if self.compute is not None:
            self.counts = ranks.first(lambda: self.counts)
        if self.keeps:
            self.predictions, self.label_ids = ranks.first(lambda: (self.predictions, self.label_ids))


class KeptOutputs:
    """An `EvaluationReader` that keeps what another one reads in the pass.

    Args:
        reader: The other reader.
        given: The pass.
    """

    def __init__(self, reader: MetricsReader, given: Pass) -> None:
        self._reader = reader
        self._pass = given
        self._records: list[Any] = []

    def record(self, loss: Tensor | None, outputs: Any, batch: Any) -> Any:
        """Return the arrays of a batch."""
        return self._reader.record(loss, outputs, batch)

    def add(self, record: Any) -> None:
        """Take the next batch."""
        self._records.append({name: record[name] for name in ("predictions", "label_ids") if name in record})
        self._reader.add(record)

    def compute(self) -> Mapping[str, float]:
        """Return the metrics; the pass has the arrays then."""
        whole = joined(self._records)
        self._pass.predictions, self._pass.label_ids = whole.get("predictions"), whole.get("label_ids")
        return self._reader.compute()

    def close(self) -> None:
        """Forget the batches."""
        self._records = []
        self._reader.close()
