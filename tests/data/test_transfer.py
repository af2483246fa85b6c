"""Batches come to the device once, in order, and no earlier than they may."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from drivetrain.data import MicroBatch, Transfer
from drivetrain.data.batch import copied_bytes

CPU, META = torch.device("cpu"), torch.device("meta")


def micro_batches(count: int, drawn: list[int]) -> Iterator[MicroBatch]:
    for number in range(count):
        drawn.append(number)
        yield MicroBatch({"features": torch.full((2, 3), float(number)), "index": torch.arange(2)}, 2.0, 2, 5)


def test_on_the_cpu_nothing_is_touched() -> None:
    transfer = Transfer(CPU)
    batch = {"features": torch.ones(2)}
    assert transfer.idle
    assert transfer(batch) is batch
    given = micro_batches(2, [])
    assert transfer.ahead(given) is given


@pytest.mark.parametrize("early", [True, False])
def test_what_is_counted_travels_with_the_moved_batch(early: bool) -> None:
    drawn: list[int] = []
    moved = list(Transfer(META).ahead(micro_batches(3, drawn), early))
    assert [each.batch["features"].device for each in moved] == [META] * 3
    assert [each[1:5] for each in moved] == [(2.0, 2, 5, 1)] * 3
    assert drawn == [0, 1, 2]


def test_data_that_must_not_be_drawn_from_early_is_not() -> None:
    drawn: list[int] = []
    moved = Transfer(META).ahead(micro_batches(3, drawn), early=False)
    for number in range(3):
        next(moved)
        assert drawn == list(range(number + 1))


class Owner:  # moves itself, and may allocate what it likes meanwhile
    def to(self, device: torch.device) -> Owner:
        return self


HOST = torch.ones(2)


def test_only_what_is_copied_from_the_host_may_be_copied_beside_a_step() -> None:
    there = HOST.to(META)
    for batch, size in (
        (HOST, 8),
        ({"a": HOST, "b": [HOST, (HOST, "text")]}, 24),
        (UserDict(a=HOST), 8),
        ([HOST, HOST.to_sparse()], math.inf),
    ):
        assert copied_bytes(batch) == size
    for batch in (there, (HOST, {"deep": [there]}), [HOST, Owner()], pack_sequence([HOST])):
        assert copied_bytes(batch) is None
