"""The small vocabulary that every other module shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Batch: TypeAlias = Any
"""One micro-batch as the data gives it: a tensor, a mapping, a sequence, or an object with a `to(device)`."""

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
"""A value that JSON can represent."""


class StepOutput(NamedTuple):
    """The result of a step that returns more than a loss. It is a tuple, so that wrappers find its tensors.

    Attributes:
        loss: The scalar to optimise, or a mapping with "loss"; its other values are logged, and each `Term`
            among them is optimised too.
        outputs: The model's outputs, for the declared metrics.
        metrics: Further scalars to log, averaged with the loss's weight.
        media: Images, texts and other values of `drivetrain.loggers` by name, or functions without arguments
            that return one. In training, the media of a step's last micro-batch are logged if a log point
            follows the step. In an evaluation, the media of each loader's first batch are logged. All other
            media are dropped, and so are all media of ranks other than 0; functions for them are not called.
    """

    loss: Tensor | Mapping[str, Any]
    outputs: Any = None
    metrics: Mapping[str, Any] | None = None
    media: Mapping[str, Any] | None = None


class Term(NamedTuple):
    """A further term of a loss, a mean with a denominator of its own: `{"loss": ..., "balance": Term(...)}`.

    The gradient of a step is that of the loss, plus scale x sum(weight x value) / sum(weight) for each term,
    over the step's micro-batches and all ranks. A term is logged under its name as the mean of its values,
    without the scale. It is a tuple, so that wrappers find its tensors.

    Attributes:
        value: A scalar with its graph, the mean over what the weight counts.
        weight: What the value is a mean over, such as the number of routed tokens: a number or a scalar
            tensor, 0 or more. A value of weight 0 has no effect, even if it is NaN.
        scale: The factor of the term in the gradient.
    """

    value: Tensor
    weight: float | Tensor
    scale: float = 1.0


@runtime_checkable
class Stateful(Protocol):
    """An object whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, arrays, numbers, strings, and dicts, lists and tuples of them."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Load the state that `state_dict` returned."""
        ...


class EvaluationReader(Protocol):
    """Reads a whole evaluation, such as for a metric that needs all outputs at once.

    Each rank calls `record` with its own batches. Rank 0 calls `add` with the records of all ranks, in the
    order of the samples, each sample once, and then `compute`.
    """

    def record(self, loss: Tensor | None, outputs: Any, batch: Batch) -> Any:
        """Return what rank 0 needs of a batch, on the host.

        Args:
            loss: The batch's loss, detached; None if the step returned none.
            outputs: The outputs of the step.
            batch: The batch.
        """
        ...

    def add(self, record: Any) -> None:
        """Take the record of the next batch."""
        ...

    def compute(self) -> Mapping[str, float]:
        """Return values by name; all ranks get them."""
        ...

    def close(self) -> None:
        """Release what is held; called after `compute`, and after an error."""
        ...


@runtime_checkable
class Logger(Protocol):
    """A destination for scalars and the configuration; see `drivetrain.loggers`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars at a step."""
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the run's configuration once, at its start."""
        ...

    def close(self) -> None:
        """Flush buffered values and close files; may be called more than once."""
        ...


@runtime_checkable
class RunLogger(Logger, Protocol):
    """A logger that is given the run of a fit before anything is restored or logged."""

    def begin(self, run: Any) -> None:
        """Get ready for a fit; `run` is its `drivetrain.run.run.Run`."""
        ...


@runtime_checkable
class CheckpointLogger(Logger, Protocol):
    """A logger that takes checkpoints too."""

    def log_checkpoint(self, address: str) -> None:
        """Take a checkpoint that has just been saved, at a path or an address."""
        ...
