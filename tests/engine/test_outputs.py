"""Outputs of any type come back as the type that a task gave: in predictions, files and parts."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor
from torch.utils import _pytree

from drivetrain import CheckpointError
from drivetrain.checkpoint.prediction_files import read_predictions


class Pair(NamedTuple):
    value: Tensor
    note: str | None


@dataclass
class Plain:
    value: Tensor
    extra: Any = None


class Registered(Plain):
    pass


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    inner: Pair


class Node:
    """No container but by torch's pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


_pytree.register_dataclass(Registered)
_pytree.register_pytree_node(Node, lambda node: ([node.value], None), lambda entries, _: Node(*entries))

MAKERS: dict[str, Any] = {
    "named tuple": lambda value: Pair(value, None),
    "named tuple with a text": lambda value: Pair(value, "text"),
    "dataclass": lambda value: Plain(value),
    "nested dataclass": lambda value: Frozen(value, Pair(value + 1, None)),
    "registered dataclass": lambda value: Registered(value, {"more": value, "none": None}),
    "ordered": lambda value: collections.OrderedDict(value=value, none=None),
    "registered type": Node,
    "with a default": lambda value: collections.defaultdict(list, value=value),
    "torch's": lambda value: torch.return_types.max((value, value.long())),
}
NOT_FILED = ("registered type", "with a default", "torch's")


def giving(kind: str) -> Regression:
    """A task that predicts an object of a type, by its name in `MAKERS`."""
    return variant(predict_step=lambda self, batch: MAKERS[kind](self(batch[0])))()


def same(left: Any, right: Any) -> bool:
    """Whether two outputs have the same types and values.

    Values are compared to float32's rounding: some processors add in another order for another size of batch.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.allclose(left, right, rtol=1e-6, atol=1e-6) and not left.requires_grad
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    if hasattr(left, "__dict__"):
        return same(vars(left), vars(right))
    return bool(left == right)


@pytest.mark.parametrize("kind", MAKERS)
def test_predictions_parts_and_files_are_of_the_type_that_the_task_gave(kind: str, tmp_path: Path) -> None:
    task, data = giving(kind), pairs(10, batch_size=5)
    with torch.no_grad():
        right = [MAKERS[kind](task(features)) for features, _ in data]
    assert same(quiet().predict(task, data), right)
    if kind not in NOT_FILED:
        assert same(quiet(micro_batch=2).predict(task, data), right)
        files = quiet().predict(task, data, save_to=tmp_path)
        types = [Pair, Plain, Frozen, Registered]
        assert same([read_predictions(file, types=types) for file in files], right)


def test_a_type_that_is_not_known_where_a_file_is_read_is_named(tmp_path: Path) -> None:
    (file,) = quiet().predict(giving("dataclass"), pairs(2), save_to=tmp_path)
    with pytest.raises(CheckpointError, match=r"test_outputs\.Plain.*types=\[Plain\]"):
        read_predictions(file)
