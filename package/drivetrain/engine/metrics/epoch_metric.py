"""A metric of all samples at once: one function gets the outputs and targets of all ranks, in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.validation import flag, number
from drivetrain.engine.metrics.arrays import as_arrays, joined

_TRUE_FIRST = ("y_true", "labels_true")
"""Names of a first parameter that takes the target, as in scikit-learn."""

_BY_NAME = ("predictions", "references")
"""The parameters of a metric of Hugging Face's evaluate."""

UpdateKey: TypeAlias = tuple[int, int]
"""What orders the updates of all ranks: the number of the global micro-batch, and the rank."""

Record: TypeAlias = tuple[UpdateKey, Any]
"""The inputs of one update, with the key of the update."""


class EpochMetric:
    """A metric that calls a function once, with the outputs and targets of all samples.

    Use it for values that no metric can add up batch by batch, such as those of scikit-learn or evaluate.
    Each sample counts once, on any number of ranks. In an evaluation the samples are in the order of the data
    set. In training they are the samples of the log interval, in the order of the steps and, within a step,
    of the ranks. The function is called on rank 0, and all ranks get its result, or raise its error.

    In an evaluation each rank keeps the inputs of its batches on the host, and rank 0 gets all of them at the
    end. Training keeps the inputs of a log interval on the device, and in checkpoints.

    Args:
        function: Called with NumPy arrays of shape [samples, ...]; returns a number, or a mapping or sequence
            of numbers. It gets what `TaskModule.metric_inputs` returns, the outputs and then the target. A
            function whose first parameter is `y_true`, as scikit-learn's are, gets the target first. One with
            parameters `predictions` and `references`, such as the `compute` of a metric of evaluate, gets
            them by name.
        transform: A function of a batch's inputs, called on the device, such as `lambda outputs, target:
            (outputs.argmax(-1), target)`. Its result is kept instead of the inputs, to save memory.
        padding: The value that fills up shorter rows if batches differ in a dimension other than the first,
            such as -100 for token labels. None refuses such batches.
        tensors: Whether the function gets tensors on the host instead of arrays.

    Raises:
        ConfigError: The function or another argument is not what is allowed.

    Example:
        ```python
        def metrics(self):
            return {
                "auc": EpochMetric(roc_auc_score, transform=lambda logits, target: (logits[:, 1], target))
            }
        ```
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        transform: Callable[..., Any] | None = None,
        padding: float | None = None,
        tensors: bool = False,
    ) -> None:
        for name, each in (("function", function), ("transform", transform)):
            if each is not None and (not callable(each) or isinstance(each, type)):
                raise ConfigError(f"EpochMetric({name}=) must be a function, not {each!r}")
        self.function = function
        self.transform = transform
        self.padding = None if padding is None else number("EpochMetric(padding=)", padding)
        self.tensors = flag("EpochMetric(tensors=)", tensors)
        self._records: list[Record] = []

    # As any metric.

    def update(self, *inputs: Any) -> None:
        """Keep the inputs of a batch.

        Raises:
            DataError: They hold something other than tensors and numbers; names it.
        """
        self.keep(inputs, (0, 0))

    def compute(self) -> Any:
        """Return the function's result for what this process has been given.

        In a run the results are those of all ranks together; see `drivetrain.TaskModule.metrics`.

        Raises:
            DataError: There was no update, or batches that differ in shape cannot be joined.
        """
        if not self._records:
            raise DataError("EpochMetric.compute() without an update: there are no samples to compute from")
        return self.result(self.records_on_host())

    def reset(self) -> None:
        """Forget all samples."""
        self._records = []

    def state_dict(self) -> dict[str, Any]:
        """Return the inputs of the updates since the last reset."""
        return {"records": [[list(key), inputs] for key, inputs in self._records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.load_states([state])

    # Over the ranks of a run; `DeclaredMetrics` calls these.

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the states of several processes, as if this one had made their updates."""
        self.reset()
        records = [
            ((int(n), int(rank)), inputs) for state in states for (n, rank), inputs in state["records"]
        ]
        self._records = sorted(records, key=_key)

    def keep(self, inputs: Sequence[Any], key: UpdateKey) -> None:
        """Keep the inputs of a batch.

        Args:
            inputs: Tensors and numbers, in tuples and mappings to any depth.
            key: The batch's number, which is the same on all ranks, and the number of this rank.

        Raises:
            DataError: As `update`.
        """
        if self.transform is not None:
            found = self.transform(*inputs)
            inputs = found if isinstance(found, tuple) else (found,)
        self._records.append((key, tuple(_kept(each) for each in inputs)))

    def records_on_host(self) -> list[Record]:
        """Return what was kept, as arrays on the host."""
        return [(key, as_arrays(inputs)) for key, inputs in self._records]

    def to_host(self) -> None:
        """Keep what was kept as arrays on the host."""
        self._records = self.records_on_host()

    def result(self, records: Sequence[Record]) -> Any:
        """Return the function's result for the records of all ranks.

        Raises:
            DataError: Batches differ in shape or structure, and there is no padding.
        """
        try:
            inputs = joined([each for _, each in sorted(records, key=_key)], self.padding)
        except (DataError, ValueError) as error:
            raise DataError(
                f"EpochMetric({_name(self.function)}): {error}. EpochMetric(padding=...) fills up shorter"
                " rows, and EpochMetric(transform=...) makes inputs of one shape"
            ) from error
        if self.tensors:
            inputs = tree_map(torch.from_numpy, inputs)
        first, named = _arguments(self.function, inputs)
        try:
            return self.function(*first, **named)
        except Exception as error:
            shapes = ", ".join(map(_described, (*first, *named.values())))
            error.add_note(f"drivetrain: raised by EpochMetric({_name(self.function)}), given {shapes}")
            raise


def _key(record: Record) -> UpdateKey:
    return record[0]


def _kept(value: Any) -> Any:
    """Return a copy: of a view only what it shows; a compiled step may reuse its outputs' memory."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return torch.tensor(value)
    if isinstance(value, (bool, int, float)) or _is_column(value):
        return torch.tensor(value)
    if isinstance(value, Mapping):
        return {name: _kept(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_kept(each) for each in value)
    what = f"list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__
    raise DataError(
        f"EpochMetric keeps tensors and numbers, and was given a {what}. Choose or make tensors of it:"
        " EpochMetric(transform=...), or TaskModule.metric_inputs"
    )


def _is_column(value: Any) -> bool:
    """Return whether it is a list with one number for each sample."""
    return isinstance(value, list) and all(isinstance(each, (bool, int, float)) for each in value)


def _arguments(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of the function, by position and by name."""
    try:
        names = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # a builtin without a signature
        names = []
    if len(inputs) == 2 and set(_BY_NAME) <= set(names):
        return (), dict(zip(_BY_NAME, inputs, strict=True))
    if len(inputs) > 1 and names and names[0] in _TRUE_FIRST:
        return (inputs[1], inputs[0], *inputs[2:]), {}
    return inputs, {}


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__qualname__", type(function).__name__))


def _described(value: Any) -> str:
    if isinstance(value, (np.ndarray, Tensor)):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
