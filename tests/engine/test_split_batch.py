"""Batches split by samples, and outputs put together again, as the type that a task gave."""

import collections
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from drivetrain import CheckpointError, DataError
from drivetrain.checkpoint.prediction_files import read_predictions
from drivetrain.core.containers import opened
from drivetrain.engine.split_batch import join_batches, split_batch


@dataclass(frozen=True)
class Sample:
    features: Tensor
    target: Tensor


class Named(NamedTuple):
    features: Tensor
    target: Tensor


def rows(count: int = 5) -> Tensor:
    return torch.arange(count * 2.0).reshape(count, 2)


def test_each_kind_of_batch_is_split_as_views_and_keeps_its_type() -> None:
    nested = lambda x, y: {"x": x, "deep": {"y": Named(x, y)}}  # noqa: E731
    mappings = [lambda x, y: OrderedDict(x=x, y=y), lambda x, y: UserDict(x=x, y=y), nested]
    makers: list[Any] = [lambda *both: [*both], lambda *both: both, lambda x, y: x, Sample, Named, *mappings]
    for make in makers:
        batch = make(rows(), -rows()[:, 0])
        parts = split_batch(batch, 2)
        assert [type(each) for each in parts] == [type(batch)] * 3
        for part, (start, stop) in zip(parts, ((0, 2), (2, 4), (4, 5)), strict=True):
            assert str(part) == str(make(rows()[start:stop], -rows()[start:stop, 0]))
        assert isinstance(batch, list) or str(join_batches(parts, [2, 2, 1])) == str(batch)
    batch = rows()
    assert split_batch(batch, 3)[1].data_ptr() == batch[3:].data_ptr()
    assert split_batch(batch, 5) == [batch]


def test_parts_are_as_even_as_can_be() -> None:
    for number, size, sizes in ((21, 4, [4, 4, 4, 3, 3, 3]), (20, 19, [10, 10]), (8, 4, [4, 4])):
        parts = split_batch(rows(number), size)
        assert [len(each) for each in parts] == sizes
        assert torch.equal(torch.cat(parts), rows(number))


def test_what_all_samples_share_goes_to_every_part() -> None:
    shared = {"scale": torch.tensor(2.0), "kind": "train", "pair": [1, 2], "mask": torch.ones(1, 3, 3)}
    batch = {"x": rows(3), "names": ["a", "b", "c"], "ids": np.arange(3), **shared}
    first, second = split_batch(batch, 2)
    assert (second["ids"].tolist(), first["names"], second["names"]) == ([2], ["a", "b"], ["c"])
    assert {name: second[name] for name in shared} == shared


def test_lists_in_outputs_have_an_entry_for_each_sample() -> None:
    assert join_batches([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]
    boxes = [[rows(3), rows(1)], [rows(2)]]
    assert [len(each) for each in join_batches(boxes, [2, 1])] == [3, 1, 2]


def test_refusals_of_batches_and_outputs() -> None:
    cases: dict[str, tuple[Any, ...]] = {
        "another first dimension": (lambda: split_batch((rows(4), rows(3)), 1), "not the samples"),
        "packed": (lambda: split_batch(pack_sequence([rows(3), rows(2)]), 1), "PackedSequence", "padded"),
        "padded outputs": (lambda: join_batches([torch.zeros(2, 5), torch.zeros(2, 7)], [2, 2]), "Pad all"),
        "means": (lambda: join_batches([{"m": torch.tensor(1.0)}], [2]), "output['m'] of 2", "each sample"),
        "columns in a list": (lambda: join_batches([[rows(3), rows(3)]], [3]), "is a list of shape (2,)"),
        "other keys": (lambda: join_batches([{"x": rows()}, {"y": rows()}], [5, 5]), "has other keys"),
        "a number": (lambda: join_batches([(rows(), 0.5)], [5]), "output[1] is a float"),
    }
    assert_refused(DataError, cases)


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


_pytree.register_dataclass(Registered)

MAKERS: dict[str, Any] = {
    "named tuple": lambda value: Pair(value, None),
    "dataclass": lambda value: Plain(value),
    "nested dataclass": lambda value: Frozen(value, Pair(value + 1, None)),
    "registered dataclass": lambda value: Registered(value, {"more": value, "none": None}),
    "ordered": lambda value: collections.OrderedDict(value=value, none=None),
}


def giving(kind: str) -> Regression:
    return variant(predict_step=lambda self, batch: MAKERS[kind](self(batch[0])))()


def same(left: Any, right: Any) -> bool:
    """Whether types and values are equal; in another size of batch some processors add in another order."""
    if isinstance(left, Tensor) or type(left) is not type(right):
        close = isinstance(right, Tensor) and torch.allclose(left, right, 1e-6, 1e-6)
        return close and not left.requires_grad
    one, other = opened(left), opened(right)
    if one is None or other is None:
        return bool(left == right)
    return len(one.entries) == len(other.entries) and all(map(same, one.entries, other.entries))


@pytest.mark.parametrize("kind", MAKERS)
def test_predictions_parts_and_files_are_of_the_type_that_the_task_gave(kind: str, tmp_path: Path) -> None:
    task, data = giving(kind), pairs(10, batch_size=5)
    with torch.no_grad():
        right = [MAKERS[kind](task(features)) for features, _ in data]
    assert same(quiet().predict(task, data), right)
    assert same(quiet(micro_batch=2).predict(task, data), right)
    files = quiet().predict(task, data, save_to=tmp_path)
    types = [Pair, Plain, Frozen, Registered]
    assert same([read_predictions(file, types=types) for file in files], right)


def test_a_type_that_is_not_known_where_a_file_is_read_is_named(tmp_path: Path) -> None:
    (file,) = quiet().predict(giving("dataclass"), pairs(2), save_to=tmp_path)
    with pytest.raises(CheckpointError, match=r"test_split_batch\.Plain.*types=\[Plain\]"):
        read_predictions(file)
