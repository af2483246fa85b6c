"""A task's declared metrics: updated, computed, reset and stored, known only by the methods that they have.

They are torchmetrics-style objects. Importing torchmetrics costs a second, which users without it should not
pay, so nothing here does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.format.tree import well_formed
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.validation import check_no_class
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.engine.metrics.epoch_metric import EpochMetric
from drivetrain.engine.metrics.states import (
    check_joinable,
    joined_states,
    members,
    registered_states,
    take_joined,
    turn_synchronisation_off,
)


def joined(returned: Mapping[str, float], declared: Mapping[str, float]) -> dict[str, float]:
    """Return the values of the step and of the declared metrics, under one prefix."""
    for name in declared:
        if name in returned:
            raise ConfigError(
                f"training_step returns a value {name!r}, and metrics() declares one of the same name; rename"
                " one of the two"
            )
    return {**returned, **declared}


def takes_loader(task: Any) -> bool:
    """Return whether a task's `metrics` takes the name of a loader."""
    return "loader" in inspect.signature(task.metrics).parameters


def declared_by(task: Any, loader: str | None = None) -> Any:
    """Return what a task's `metrics` returns, a module of several, such as torchmetrics' MetricCollection, as
    a mapping: its metrics by their names.

    Args:
        loader: The name of the evaluation data, for a method that takes it; None for training.
    """
    metrics = task.metrics(loader=loader) if takes_loader(task) else task.metrics()
    items: Any = getattr(metrics, "items", None)
    if isinstance(metrics, torch.nn.Module) and callable(items):
        metrics = dict(items())
    check_no_class("metrics()", metrics)
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            "metrics() must return a mapping of names to metrics, such as {'accuracy': Accuracy(...)}, not"
            f" a {type(metrics).__name__}"
        )
    if "loss" in (metrics or ()):
        raise ConfigError(
            "metrics() has a metric called 'loss', the name of the value that a step minimises. Give it"
            " another name, such as 'mean_loss'"
        )
    return {} if metrics is None else metrics


class DeclaredMetrics:
    """A task's declared metrics for one purpose: updated together, computed to named floats, reset.

    Attributes:
        metrics: The metrics by name, on the device.
        results: What each metric returned when they were computed last, by name; that of an `EpochMetric` on
            rank 0 alone.
        drawn: The metrics that are drawn: a matrix or a curve that they compute gives no numbers.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, ranks: Ranks = ALONE) -> None:
        names: dict[int, str] = {}
        for name, metric in metrics.items():
            check_no_class(f"metrics()[{name!r}]", metric)
            first = names.setdefault(id(metric), name)
            if first != name:
                raise ConfigError(
                    f"metrics() has the same {type(metric).__name__} as {first!r} and as {name!r}: it would"
                    " be given each batch twice. Make an object for each name"
                )
            lacking = [
                method
                for method in ("update", "compute", "reset")
                if not callable(getattr(metric, method, None))
            ]
            if lacking:
                raise ConfigError(
                    f"metrics()[{name!r}] is a {type(metric).__name__} without {', '.join(lacking)}; a metric"
                    " has update, compute and reset, as torchmetrics' have"
                )
        self._device, self._ranks = device, ranks
        self.metrics = {name: _moved(metric, device) for name, metric in metrics.items()}
        self._of_epoch = {name: each for name, each in self.metrics.items() if isinstance(each, EpochMetric)}
        self._added_up = {name: each for name, each in self.metrics.items() if name not in self._of_epoch}
        self._updates = tuple(metric.update for metric in self._added_up.values())
        turn_synchronisation_off(self.metrics)
        if not ranks.alone:
            check_joinable(self._added_up)
        self.updated = False
        self.results: dict[str, Any] = {}
        self.drawn: Collection[str] = ()

    def __bool__(self) -> bool:
        return bool(self.metrics)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.metrics.values())

    def directions(self) -> dict[str, str]:
        """Return "max" or "min" for each metric that has `higher_is_better`, as torchmetrics' have."""
        higher = {name: getattr(each, "higher_is_better", None) for name, each in self.metrics.items()}
        return {name: "max" if each else "min" for name, each in higher.items() if isinstance(each, bool)}

    def copies(self) -> DeclaredMetrics:
        """Return a fresh, reset copy, for another loader."""
        copied = {name: copy.deepcopy(metric) for name, metric in self.metrics.items()}
        other = DeclaredMetrics(copied, self._device, self._ranks)
        other.reset()
        return other

    @property
    def reads_all(self) -> bool:
        """Whether one is an `EpochMetric`, which needs all samples in order."""
        return bool(self._of_epoch)

    def update(self, inputs: Sequence[Any], number: int = 0) -> None:
        """Update every metric with the same inputs, without gradients.

        Args:
            number: The number of the round, equal on all ranks, that the inputs belong to.
        """
        if not isinstance(inputs, (tuple, list)):  # a tensor would be taken apart into its rows
            raise ConfigError(
                f"metric_inputs returned a {type(inputs).__name__}; it returns the tuple of what each"
                " metric's update gets, such as (outputs, batch['label'])"
            )
        with torch.no_grad():
            for update in self._updates:
                update(*inputs)
            for metric in self._of_epoch.values():
                metric.keep(inputs, (number, self._ranks.rank))
        self.updated = True

    def to_host(self) -> None:
        """Move what each `EpochMetric` has kept to the host."""
        for metric in self._of_epoch.values():
            metric.to_host()

    def compute(self, whole: bool = True) -> dict[str, float]:
        """Return all values as floats: a mapping or a vector gives one for each entry, `name/key` or
        `name/0`. If the metric has `labels`, as many texts as a dimension has entries, they replace the
        numbers: `name/cat`.
        """
        self.results = {}
        if self._ranks.alone:
            values = self._values() if self.updated else {}
        else:
            with joined_states(list(self._added_up.values()), self.updated, self._ranks) as updated:
                values = self._values() if updated else {}
        if whole and self._of_epoch:
            _add(values, self._values_of_epoch().items())
        return values

    def _values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metric in self._added_up.items():
            result = self.results[name] = metric.compute()
            if name not in self.drawn or is_flat(result):
                _add(values, _floats(name, result, _labels(metric)))
        return values

    def _values_of_epoch(self) -> dict[str, float]:
        gathered = self._ranks.gather_first([metric.records_on_host() for metric in self._of_epoch.values()])

        def values() -> dict[str, float]:
            found: dict[str, float] = {}
            for (name, metric), of_ranks in zip(
                self._of_epoch.items(), zip(*gathered or (), strict=True), strict=True
            ):
                if records := [each for of_rank in of_ranks for each in of_rank]:
                    self.results[name] = metric.result(records)
                    _add(found, _floats(name, self.results[name]))
            return found

        return self._ranks.first(values)

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()
        self.updated = False

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all metrics, copied."""
        return {
            "updated": self.updated,
            "metrics": {name: _metric_state(name, metric) for name, metric in self.metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stored = state["metrics"]
        if set(stored) != set(self.metrics):
            raise CheckpointError(
                f"the checkpoint has training metrics {sorted(stored)}, the task declares"
                f" {sorted(self.metrics)}"
            )
        for name, metric in self.metrics.items():
            _load_metric(name, metric, stored[name])
        self.updated = bool(state["updated"])

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over the states of one process, or of several as if this one had made all their updates."""
        together: list[list[dict[str, Any]]] = []
        updated = False
        for state in states:
            self.load_state_dict(state)
            updated = updated or self.updated
            together.append(registered_states(list(self._added_up.values())))
        if len(states) > 1:
            take_joined(list(self._added_up.values()), together)
            for name, metric in self._of_epoch.items():
                metric.load_states([state["metrics"][name]["own"] for state in states])
        self.updated = updated


def _moved(metric: Any, device: torch.device) -> Any:
    if not callable(getattr(metric, "to", None)):
        return metric
    moved = metric.to(device)
    return metric if moved is None else moved  # in place, as some do


def is_flat(result: Any) -> bool:
    """Return whether a metric's result is a number, a vector or a mapping, and no matrix and no curve."""
    if isinstance(result, (list, tuple)):
        return all(isinstance(each, (int, float)) or getattr(each, "ndim", 1) == 0 for each in result)
    return getattr(result, "ndim", 0) < 2


def _labels(metric: Any) -> Sequence[str]:
    labels = getattr(metric, "labels", None)
    is_texts = isinstance(labels, (list, tuple)) and all(isinstance(each, str) for each in labels)
    return labels if is_texts else ()  # type: ignore[return-value]


def _add(values: dict[str, float], others: Iterable[tuple[str, float]]) -> None:
    for name, value in others:
        if name in values:
            raise ConfigError(
                f"the metrics compute two values called {name!r}; rename a metric, a key of its result or"
                " one of its labels"
            )
        values[name] = value


def _floats(name: str, value: Any, labels: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _floats(f"{name}/{key}", each, labels)
        return
    if isinstance(value, Tensor):
        value = value.detach()
    listed = value.tolist() if hasattr(value, "tolist") else value  # tensors, and what is like numpy's arrays
    if isinstance(listed, (list, tuple)):
        for key, each in zip(
            labels if len(labels) == len(listed) else range(len(listed)), listed, strict=True
        ):
            yield from _floats(f"{name}/{key}", each, labels)
        return
    try:
        yield name, float(listed)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the metric {name!r} computed a {type(listed).__name__}, which is no number; a metric computes a"
            " number, a tensor, or a mapping or sequence of them"
        ) from None


def _metric_state(name: str, metric: Any) -> dict[str, Any]:
    if isinstance(metric, torch.nn.Module):
        return {
            "own": {key: _copied(value) for key, value in metric.state_dict().items()},
            "members": [_member_state(member) for member in members(metric)],
        }
    if callable(getattr(metric, "state_dict", None)) and callable(getattr(metric, "load_state_dict", None)):
        return {"own": metric.state_dict(), "members": []}
    raise CheckpointError(
        f"the metric {name!r} ({type(metric).__name__}) has no state_dict and load_state_dict, so its state"
        " in the middle of a log interval cannot be saved. Add them, or set Trainer(train_metrics=False)"
    )


def _member_state(member: torch.nn.Module) -> dict[str, Any]:
    """Return the state that a member's `state_dict` leaves out.

    torchmetrics' states are not persistent by default, its wrappers keep tensors as plain attributes, and its
    counters are private whole numbers; its public numbers are configuration. A module of another kind may
    keep anything as a plain attribute.
    """
    defaults = getattr(member, "_defaults", None)  # torchmetrics' table of registered states
    return {name: _copied(value) for name, value in vars(member).items() if _is_state(name, value, defaults)}


def _is_state(name: str, value: Any, defaults: Mapping[str, Any] | None) -> bool:
    if isinstance(value, bool):
        return False
    if defaults is None:
        return isinstance(value, (Tensor, int, float))
    private = name.startswith("_")
    return name in defaults or isinstance(value, int if private else Tensor)


def _copied(value: Any) -> Any:
    # Metrics add to their tensors in place.
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _load_metric(name: str, metric: Any, state: dict[str, Any]) -> None:
    inside = members(metric)
    if len(inside) != len(state["members"]):
        raise CheckpointError(
            f"the metric {name!r} has {len(inside)} parts, the checkpoint {len(state['members'])}; resume"
            " with the metrics that it was saved with"
        )
    with well_formed(f"the checkpoint's state of the metric {name!r} ({type(metric).__name__})"):
        metric.load_state_dict(state["own"])
    for member, each in zip(inside, state["members"], strict=True):
        device = getattr(member, "device", None)
        for key, value in each.items():
            setattr(member, key, _on_device(value, device))
        if hasattr(member, "_computed"):
            member._computed = None  # what it last computed, of another state


def _on_device(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().to(device)
    return [_on_device(each, device) for each in value] if isinstance(value, list) else value
