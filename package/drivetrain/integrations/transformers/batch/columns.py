"""The columns of a batch that a model takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils import TransformersKwargs
from transformers.utils.generic import find_labels

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.messages import logger

_LOG = logger(__name__)

_LABELS = ("labels", "label", "label_ids")


class Columns:
    """Chooses the columns of a batch that a model's forward takes; the others are logged once.

    Args:
        model: The model of transformers, without adapters.
        labels: The names of the labels; None finds them as transformers does.
        keeps_all: Whether every column is passed.

    Raises:
        ConfigError: `labels` is a text.
    """

    def __init__(self, model: Any, labels: Sequence[str] | None, keeps_all: bool) -> None:
        if isinstance(labels, str):
            raise ConfigError(f"label_names must be a sequence of names, not a text: give [{labels!r}]")
        parameters = inspect.signature(model.forward).parameters
        names = set(parameters)
        rest = next((each for each in parameters.values() if each.kind is each.VAR_KEYWORD), None)
        if rest is not None:
            names |= TransformersKwargs.__annotations__.keys()
            if "TransformersKwargs" not in str(rest.annotation):  # which says what there may be
                names |= set(labels or ())
        self.labels = tuple(find_labels(type(model)) if labels is None else labels)
        self._names = frozenset(names)
        self._keeps_all = keeps_all
        self._model = type(model).__name__
        self._dropped: set[str] = set()
        self.of_script: frozenset[str] | None = None
        """The columns of samples that a script has chosen itself."""

    def check_labels(self) -> None:
        """Check that the model's own loss can use each label.

        Raises:
            ConfigError: A name in `label_names` is no parameter of the model's forward.
        """
        for name in self.labels:
            if name not in self._names:
                allowed = [each for each in self._names if "label" in each or each.endswith("_positions")]
                raise ConfigError(
                    f"label_names has {name!r}, which {self._model}.forward does not take."
                    f" {nearest(name, allowed)} For a label that only your own loss reads, give"
                    " compute_loss_func"
                )

    def takes(self, name: str) -> bool:
        """Return whether the forward has this parameter."""
        return name in self._names

    def of_samples(self, names: Any) -> set[str]:
        """Return the columns of samples to keep before they are collated."""
        if self._keeps_all:
            return set(names)
        if self.of_script is not None:
            return set(names) & self.of_script
        kept = {name for name in names if name in self._names or name in _LABELS or name in self.labels}
        self._report(set(names) - kept)
        return kept

    def of_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch that forward takes, its labels under the parameter's name.

        Labels that `label_names` asks for are among them, also if forward does not take them.
        """
        columns = self.of_collation(batch)
        if self._keeps_all:
            return columns
        kept = {name: value for name, value in columns.items() if name in self._names or name in self.labels}
        if len(kept) < len(columns):
            self._report(columns.keys() - kept.keys())
        return kept

    def of_collation(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return all columns of a batch, its labels under the name that forward has for them."""
        columns = {str(name): batch[name] for name in batch}
        if "labels" in self._names and "labels" not in columns:
            for name in _LABELS:
                if name in columns:
                    columns["labels"] = columns.pop(name)
                    break
        return columns

    def of_forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch that forward takes, without labels that are for the loss alone."""
        columns = self.of_batch(batch)
        for name in self.labels:
            if name not in self._names:
                columns.pop(name, None)
        return columns

    def has_labels(self, columns: Mapping[str, Any]) -> bool:
        """Return whether a batch has all labels of the loss."""
        names = [name for name in self.labels if name in columns]
        return bool(names) and all(name in columns for name in self.labels if self._is_needed(name))

    def _is_needed(self, name: str) -> bool:
        return name in ("labels", "start_positions", "end_positions")

    def _report(self, dropped: set[str]) -> None:
        new = dropped - self._dropped
        if new:
            self._dropped |= new
            _LOG.info(
                f"{self._model}.forward does not take the columns {', '.join(sorted(new))}, which are left"
                " out. TransformersTask(remove_unused_columns=False) passes all columns"
            )
