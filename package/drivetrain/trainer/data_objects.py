"""Data objects: an object with `train_data()` and so on, what is called around it, and its state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from drivetrain.callbacks import Callback
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.synonyms import foreign
from drivetrain.core.types import Stateful
from drivetrain.core.validation import check_no_class
from drivetrain.data import combined
from drivetrain.data.reading import as_samples
from drivetrain.task.task import TaskModule

_METHODS = ("train_data", "validation_data", "test_data", "predict_data")

_LOADERS = {
    "training": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""The names of Lightning's data methods by stage."""


def pick_data(data: Any, stage: str) -> Any:
    """Return a stage's data: the data as given, or the result of the object's `train_data()`,
    `validation_data()` and so on.
    """
    method = f"{'train' if stage == 'training' else stage}_data"
    if _has(data, method):
        return _read(getattr(data, method)(), stage)
    offered = [each for each in _METHODS if _has(data, each)]
    if offered:
        raise ConfigError(f"{type(data).__name__} has no {method}(). {nearest(method, offered)}")
    if (theirs := foreign(data)) is not None:
        raise ConfigError(f"the {stage} data is {theirs}")
    given = _LOADERS[stage]
    if _has(data, given) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise ConfigError(f"{type(data).__name__} has {given}(), which is called {method}() here. Rename it")
    return _read(data, stage)


def _read(data: Any, stage: str) -> Any:
    """Return columns, and for training mappings of datasets, as the dataset that they stand for."""
    found = as_samples(data, stage)
    return combined(found) if stage == "training" and isinstance(found, Mapping) else found


def _has(data: Any, method: str) -> bool:
    # Properties are not evaluated: some data sets (torchvision's) have deprecated ones of these names, which
    # warn.
    return not isinstance(inspect.getattr_static(data, method, None), property) and callable(
        getattr(data, method, None)
    )


def fit_data(train_data: Any, validation_data: Any) -> tuple[Any, Any]:
    """Return training and validation data; an object with `validation_data()` gives both, unless validation
    data is passed separately.
    """
    if validation_data is None and callable(getattr(train_data, "train_data", None)):
        make = getattr(train_data, "validation_data", None)
        validation_data = as_samples(make(), "validation") if callable(make) else None
    elif validation_data is not None:
        validation_data = pick_data(validation_data, "validation")
    return pick_data(train_data, "training"), validation_data


@contextmanager
def begun(verb: str, task: TaskModule, *given: Any) -> Iterator[None]:
    """Call `begin` of the data objects, run the block that asks them for data, and call their `end`.

    Args:
        *given: The data as given; what is no data object, or has neither method, is left alone.
    """
    for each in given:
        check_no_class("the data", *(each.values() if isinstance(each, Mapping) else (each,)))
    objects = {id(each): each for each in given if _is_data_object(each)}.values()
    begun_: list[Any] = []
    try:
        for each in objects:
            if _has(each, "begin"):
                begun_.append(each)  # an object that fails halfway is ended too
                each.begin(verb, task)
        yield
    finally:
        for each in begun_:
            if _has(each, "end"):
                each.end(verb)


def _is_data_object(data: Any) -> bool:
    return any(_has(data, method) for method in _METHODS)


class DataObject(Callback):
    """The state of a data object as a part of a run's checkpoints."""

    def __init__(self, data: Stateful) -> None:
        self.state_dict, self.load_state_dict = data.state_dict, data.load_state_dict


def state_of(data: Any) -> list[DataObject]:
    """Return the part of the checkpoints that holds a data object's state, if it has one."""
    return [DataObject(data)] if _is_data_object(data) and isinstance(data, Stateful) else []
