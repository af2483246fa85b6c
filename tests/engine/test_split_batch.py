"""Batches split by samples, and outputs put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from drivetrain import DataError
from drivetrain.engine.split_batch import join_outputs, split_batch


@dataclass(frozen=True)
class Pair:
    features: Tensor
    target: Tensor


class Named(NamedTuple):
    features: Tensor
    target: Tensor


def rows(count: int = 5) -> Tensor:
    return torch.arange(count * 2.0).reshape(count, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: [x, y],
        lambda x, y: (x, y),
        lambda x, y: {"x": x, "y": y},
        lambda x, y: {"x": x, "deep": {"y": Named(x, y)}},
        lambda x, y: OrderedDict(x=x, y=y),
        lambda x, y: UserDict(x=x, y=y),
        lambda x, y: Pair(x, y),
        lambda x, y: Named(x, y),
        lambda x, y: x,
    ],
)
def test_each_kind_of_batch_is_split_and_keeps_its_type(make: Any) -> None:
    batch = make(rows(), -rows()[:, 0])
    parts = split_batch(batch, 2)
    assert [type(each) for each in parts] == [type(batch)] * 3
    for part, (start, stop) in zip(parts, ((0, 2), (2, 4), (4, 5)), strict=True):
        assert str(part) == str(make(rows()[start:stop], -rows()[start:stop, 0]))
    assert str(join_outputs(parts, [2, 2, 1])) == str(batch)


def test_parts_are_views() -> None:
    batch = rows()
    assert split_batch(batch, 3)[1].data_ptr() == batch[3:].data_ptr()
    assert split_batch(batch, 5) == [batch]


@pytest.mark.parametrize(
    ("number", "size", "sizes"),
    [(21, 4, [4, 4, 4, 3, 3, 3]), (20, 19, [10, 10]), (8, 4, [4, 4]), (3, 2, [2, 1])],
)
def test_parts_are_as_even_as_can_be(number: int, size: int, sizes: list[int]) -> None:
    parts = split_batch(rows(number), size)
    assert [len(each) for each in parts] == sizes
    assert torch.equal(torch.cat(parts), rows(number))


def test_what_is_of_no_sample_goes_to_every_part() -> None:
    batch = {
        "x": rows(3),
        "names": ["a", "b", "c"],
        "scale": torch.tensor(2.0),
        "kind": "train",
        "pair": [1, 2],
        "mask": torch.ones(1, 3, 3),
        "ids": np.arange(3),
    }
    first, second = split_batch(batch, 2)
    assert second["ids"].tolist() == [2]
    del batch["ids"], second["ids"]
    assert first["names"] == ["a", "b"]
    assert second["names"] == ["c"]
    assert {**second, "x": 0, "names": 0} == {**batch, "x": 0, "names": 0}


class Graph:
    num_graphs = 4


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((rows(4), rows(3)), "not the samples.*in the task's forward.*first dimension of one"),
        ((rows(2), (rows(2), rows(2))), "a tuple inside of a batch"),
        ({"x": rows(4), "boxes": [rows(4), rows(1), rows(2), rows(4)]}, "a list inside of a batch"),
        (pack_sequence([rows(3), rows(2)]), "PackedSequence"),
        (Graph(), "a Graph cannot be split"),
        (rows(4).to_sparse(), "torch.sparse_coo"),
        ({"x": rows(4), "more": object()}, "a object cannot be split"),
    ],
)
def test_what_is_not_surely_by_samples_is_refused(batch: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        split_batch(batch, 1)


def test_lists_with_an_entry_for_each_sample_are_put_in_a_row() -> None:
    assert join_outputs([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]
    boxes = [[rows(3), rows(1)], [rows(2)]]
    assert [len(each) for each in join_outputs(boxes, [2, 1])] == [3, 1, 2]


def test_columns_are_told_from_samples_by_their_kinds() -> None:
    logits, labels = join_outputs([(rows(2), torch.arange(2)), (rows(2), torch.arange(2))], [2, 2])
    assert logits.shape == (4, 2)
    assert labels.tolist() == [0, 1, 0, 1]


def test_outputs_of_different_lengths_are_refused_with_what_to_do() -> None:
    outputs = [{"x": torch.zeros(2, 5)}, {"x": torch.zeros(2, 7)}]
    with pytest.raises(
        DataError, match=r"\(2, 5\), \(2, 7\).*padded.*Pad all to one length, or return a list"
    ):
        join_outputs(outputs, [2, 2])


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [rows(3), rows(1)],
        ["a", "b"],
        [{"x": rows(2)}, {"y": rows(2)}],
        [[rows(2), rows(2)], [rows(2), rows(2)]],  # columns, or samples: nobody can say
    ],
)
def test_outputs_without_an_entry_for_each_sample_are_refused(outputs: Any) -> None:
    with pytest.raises(DataError, match="cannot be put together"):
        join_outputs(outputs, [2, 2])
