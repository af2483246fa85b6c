"""Batches come to the device once, in order, and no earlier than they may."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from drivetrain.data import MicroBatch, Transfer
from drivetrain.data.batch import host_tensors_only

CPU, META = torch.device("cpu"), torch.device("meta")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


@pytest.mark.parametrize("device", [META, pytest.param(torch.device("cuda", 0), marks=needs_cuda)], ids=str)
def test_data_that_must_not_be_drawn_from_early_is_not(device: torch.device) -> None:
    drawn: list[int] = []
    moved = Transfer(device).ahead(micro_batches(3, drawn), early=False)
    for number in range(3):
        next(moved)
        assert drawn == list(range(number + 1))


class Owner:  # moves itself, and may allocate what it likes meanwhile
    def to(self, device: torch.device) -> Owner:
        return self


HOST = torch.ones(2)


def test_only_what_is_copied_from_the_host_may_be_copied_beside_a_step() -> None:
    there = HOST.to(META)
    for batch in (HOST, {"a": HOST, "b": [HOST, (HOST, "text")]}, UserDict(a=HOST)):
        assert host_tensors_only(batch)
    for batch in (there, (HOST, {"deep": [there]}), [HOST, Owner()], pack_sequence([HOST])):
        assert not host_tensors_only(batch)


@needs_cuda
def test_a_batch_that_is_computed_on_the_device_is_cast_after_that() -> None:
    device = torch.device("cuda", 0)

    def computed() -> Iterator[MicroBatch]:
        for number in range(5):
            value = torch.zeros(2048, 2048, device=device)
            for _ in range(20):  # long enough that a cast in another stream would read before it is done
                value = value @ value + number
                value.clamp_(max=number)
            yield MicroBatch({"features": value}, 1.0)

    given = [
        float(each.batch["features"].max()) for each in Transfer(device, torch.float64).ahead(computed())
    ]
    assert given == [0.0, 1.0, 2.0, 3.0, 4.0]


@needs_cuda
def test_memory_of_a_batch_in_use_is_not_given_to_the_next_copy() -> None:
    device = torch.device("cuda", 0)
    host = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(20)]
    factor = torch.ones(4096, 4096, device=device) / 4096
    sums = []
    for each in Transfer(device).ahead(MicroBatch(batch, 1.0) for batch in host):
        torch.linalg.multi_dot([factor] * 4)  # keeps the step's stream behind the copies
        sums.append(each.batch.mean())
        del each
    assert [float(value) for value in sums] == [float(number) for number in range(20)]
