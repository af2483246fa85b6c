"""Metrics over a whole evaluation: `compute_metrics(EvalPrediction)`, as transformers calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import EvalPrediction

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.validation import check_names
from drivetrain.data.batch import batch_size
from drivetrain.engine.metrics.arrays import as_arrays, joined
from drivetrain.integrations.transformers.batch.columns import Columns

INCLUDED = ("inputs", "loss")
"""What `include_for_metrics` may name."""


class Read(NamedTuple):
    """Outputs of a step that has separated them from the labels itself."""

    predictions: Any
    label_ids: Any


class MetricsReader:
    """Reads the outputs of an evaluation for `compute_metrics`; see `EvaluationReader`.

    Args:
        compute: Called with an `EvalPrediction`; returns values by name.
        columns: The model's columns.
        ignored: The outputs that are left out, such as "past_key_values".
        preprocess: Called with logits and labels on the device, before they are kept; None keeps the logits.
        by_batch: Whether `compute` is called with each batch and `compute_result`, True for the last one. The
            batch is tensors on the CPU then, instead of arrays.
        include: What else an `EvalPrediction` has: "inputs", "loss".
        needs_labels: Whether a batch without labels is an error, if the model has labels.
    """

    def __init__(
        self,
        compute: Callable[..., Mapping[str, Any]],
        columns: Columns,
        *,
        ignored: Collection[str] = (),
        preprocess: Callable[[Any, Any], Any] | None = None,
        by_batch: bool = False,
        include: Collection[str] = (),
        needs_labels: bool = True,
    ) -> None:
        self._compute = compute
        self._needs_labels = needs_labels
        self._columns = columns
        self._ignored = {*ignored, "loss"}
        self._preprocess = preprocess
        self._by_batch = by_batch
        self._include = include
        self._records: list[Any] = []
        self._waiting: Any = None

    def record(self, loss: Tensor | None, outputs: Any, batch: Any) -> Any:
        """Return the arrays of a batch.

        Raises:
            DataError: It has no labels, which are needed.
        """
        columns = self._columns.of_batch(batch)
        if isinstance(outputs, Read):
            predictions, labels = outputs
        else:
            labels = _alone(tuple(columns[name] for name in self._columns.labels if name in columns))
            predictions = predictions_of(outputs, self._ignored)
        if labels is None and self._needs_labels and self._columns.labels:
            raise DataError(
                "compute_metrics needs labels, and this batch lacks them: its columns are"
                f" {', '.join(columns)}. Labels are {' and '.join(self._columns.labels)};"
                " TransformersTask(label_names=...) names others. Use predict for data without labels"
            )
        if self._preprocess is not None:
            predictions = self._preprocess(predictions, labels)
        kept = {"predictions": predictions, "label_ids": labels}
        if "inputs" in self._include:
            main = getattr(outputs, "main_input_name", None) or next(iter(columns))
            kept["inputs"] = columns.get(main)
        if "loss" in self._include and loss is not None:
            kept["losses"] = loss.reshape(1).expand(batch_size(batch) or 1)
        return as_arrays({name: each for name, each in kept.items() if each is not None})

    def add(self, record: Any) -> None:
        """Take the next batch."""
        if not self._by_batch:
            self._records.append(record)
            return
        if self._waiting is not None:
            self._compute(_prediction(_as_tensors(self._waiting)), compute_result=False)
        self._waiting = record

    def compute(self) -> dict[str, float]:
        """Return the values by name.

        Raises:
            ConfigError: A value is not a number.
        """
        if self._by_batch:
            found = (
                {}
                if self._waiting is None
                else self._compute(_prediction(_as_tensors(self._waiting)), compute_result=True)
            )
        else:
            found = self._compute(_prediction(joined(self._records)))
        return _floats(found)

    def close(self) -> None:
        """Forget the batches."""
        self._waiting, self._records = None, []


def check_compute_metrics(compute: Any, by_batch: bool, include: Any) -> None:
    """Check the arguments of a task.

    Raises:
        ConfigError: They cannot work; says what is allowed.
    """
    if isinstance(include, str):
        raise ConfigError(f"include_for_metrics must be a sequence of names, not a text: give [{include!r}]")
    check_names("include_for_metrics", dict.fromkeys(include), INCLUDED)
    if compute is None:
        return
    if not callable(compute):
        raise ConfigError(f"compute_metrics must be a function of an EvalPrediction, not {compute!r}")
    if by_batch and "compute_result" not in inspect.signature(compute).parameters:
        raise ConfigError(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) with each batch."
            " Give it the parameter compute_result"
        )


def check_unused(options: Mapping[str, Any]) -> None:
    """Check that no option for `compute_metrics` is given without it.

    Raises:
        ConfigError: One is.
    """
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name} has no effect without compute_metrics: give that too, or leave it out")


def predictions_of(outputs: Any, ignored: Collection[str]) -> Any:
    """Return a model's outputs without the loss: one tensor alone, several as a tuple.

    The outputs of a module that is no model of transformers may be the attributes of any object.
    """
    if not isinstance(outputs, (Mapping, Sequence, Tensor)) and hasattr(outputs, "loss"):
        outputs = vars(outputs)
    if isinstance(outputs, Mapping):
        return _alone(
            tuple(each for name, each in outputs.items() if name not in ignored and each is not None)
        )
    if isinstance(outputs, tuple) and outputs and isinstance(outputs[0], Tensor) and not outputs[0].ndim:
        return _alone(outputs[1:])
    return outputs


def _alone(values: tuple[Any, ...]) -> Any:
    return (values[0] if len(values) == 1 else values) if values else None


def _prediction(record: Mapping[str, Any]) -> EvalPrediction:
    return EvalPrediction(
        predictions=record.get("predictions"),
        label_ids=record.get("label_ids"),
        inputs=record.get("inputs"),
        losses=record.get("losses"),
    )


def _as_tensors(record: Any) -> Any:
    """Return a batch's arrays as tensors, which transformers gives to `compute_metrics` by batch."""
    return tree_map_only(np.ndarray, torch.from_numpy, record)


def _floats(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"compute_metrics must return values by name, not a {type(found).__name__}")
    values = {}
    for name, value in found.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"compute_metrics returned {name!r} as a {type(value).__name__}; a value is one number."
                " Give each number of a list or mapping a name of its own"
            ) from None
    return values
