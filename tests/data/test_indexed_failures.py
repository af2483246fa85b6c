"""What is said when a dataset, its sampler, its collation or a worker fails."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.indexed import (
    Augmented,
    ByLength,
    batches,
    flat,
    indices,
    source,
)
from torch import Tensor

from drivetrain.core.errors import DataError
from drivetrain.core.random_streams import preserved


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    with preserved():
        yield


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_names_the_batch_and_its_indices(workers: int) -> None:
    order = flat(indices(source(), epoch=2))
    read = source(Augmented(fails=(order[7], ValueError("bad file"))), workers=workers)
    taken = read.batches(2, 3)
    assert [int(sample[0]) for sample in next(taken)[0]] == order[3:6]
    with pytest.raises(DataError) as caught:
        next(taken)
    message = str(caught.value)
    assert "the training data raised at batch 2 of epoch 2" in message
    assert f"samples 6 to 8 of its order, dataset indices [{', '.join(map(str, order[6:9]))}]" in message
    assert "ValueError" in message
    assert "bad file" in message
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_runs_out_early_does_not_shorten_the_epoch(workers: int) -> None:
    read = source(Augmented(fails=(4, StopIteration())), shuffle=False, workers=workers)
    with pytest.raises(DataError, match=r"(?s)batch 1 of epoch 0.*raised StopIteration for index 4"):
        batches(read)


def exhausted(samples: list[Tensor]) -> Any:
    raise StopIteration


def broken(samples: list[Tensor]) -> Any:
    raise RuntimeError("sizes differ")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("collate", "text"), [(exhausted, "StopIteration"), (broken, "sizes differ")])
def test_a_collate_fn_that_raises_names_the_batch(workers: int, collate: Any, text: str) -> None:
    with pytest.raises(DataError, match=rf"(?s)batch 0 of epoch 0 \(samples 0 to 2.*{text}"):
        batches(source(collate_fn=collate, workers=workers))


class Broken(ByLength):
    def __iter__(self) -> Iterator[list[int]]:
        raise ValueError("no weights")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_sampler_that_raises_says_so(workers: int, kind: str) -> None:
    message = r"the training data's sampler \(Broken\) raised in epoch 3: ValueError: no weights"
    with pytest.raises(DataError, match=message):
        batches(source(workers=workers, **{kind: Broken()}), epoch=3)


def test_the_batch_of_a_batch_sampler_that_fails_is_named_by_its_number() -> None:
    sizes = [len(batch) for batch in indices(source(batch_sampler=ByLength()))]
    order = flat(indices(source(batch_sampler=ByLength())))
    bad = Augmented(fails=(order[sum(sizes[:2])], ValueError("bad")))
    with pytest.raises(DataError, match=f"batch 2 of epoch 0 .samples {sum(sizes[:2])} to"):
        batches(source(bad, batch_sampler=ByLength()), position=sizes[0])


def test_an_interrupt_in_the_dataset_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        batches(source(Augmented(fails=(4, KeyboardInterrupt()))))


class Killed(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_is_an_error() -> None:
    read = source(Killed(), shuffle=False, workers=1)
    with pytest.raises(DataError) as caught:
        batches(read)
    text = str(caught.value)
    assert re.search(r"training data cannot be read on; batch [01] of epoch 0 \(samples", text)
    assert re.search(r"worker 0 \(pid \d+\) was killed by signal SIGKILL: .*memory.*num_workers", text)
