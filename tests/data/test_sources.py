"""Lists and other iterables, read from any position."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import warned
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.core.errors import DataError
from drivetrain.data import Source, as_source


def values(source: Source, epoch: int = 0, position: int = 0) -> list[Any]:
    return [batch.tolist() for batch, _, _ in source.batches(epoch, position)]


class Noise:  # batches drawn from all of the host's generators
    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.rand(2) + random.random() + float(np.random.rand())


class Cursor:  # batches with noise below 1, resumed by its own state, which it changes in place
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches, self.state, self.asked = batches, {"used": [0]}, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.state["used"][0] < len(self.batches):
            self.state["used"][0] += 1
            self.asked += 1
            yield self.batches[self.state["used"][0] - 1] + torch.rand(()) / 2
        self.state["used"][0] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def numbered(count: int) -> list[Tensor]:
    return [torch.full((2, 1), float(number)) for number in range(count)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_read_from_any_position(kind: Callable[[Any], Any]) -> None:
    source = as_source(kind(torch.tensor([[float(i)]]) for i in range(4)), "training", seed=0)
    assert [source.count(position) for position in (0, 3, 4, 9)] == [4, 1, 0, 0]
    assert values(source) == [[[0.0]], [[1.0]], [[2.0]], [[3.0]]]
    assert values(source, epoch=1, position=2) == [[[2.0]], [[3.0]]]
    assert [advance for _, advance, _ in source.batches(0, 0)] == [1] * 4


def test_an_iterable_draws_the_same_in_any_process_and_after_anything() -> None:
    source = as_source(Noise(), "training", seed=3)
    first, second = values(source, epoch=0), values(source, epoch=1)
    assert not any(batch in second for batch in first)
    random.random(), np.random.rand(), torch.rand(3)
    fresh = as_source(Noise(), "training", seed=3)
    assert values(fresh, epoch=1) == second
    assert values(fresh, epoch=0) == first
    assert values(as_source(Noise(), "training", seed=4)) != first


def test_an_iterable_without_state_is_drawn_again_and_says_so() -> None:
    expected = values(as_source(Noise(), "training", seed=3), epoch=1)
    source = as_source(Noise(), "training", seed=3)
    with warned("first 2 batches are drawn again.*state_dict"):
        assert values(source, epoch=1, position=2) == expected[2:]


def test_a_stateful_iterable_goes_on_from_its_own_state() -> None:
    expected = values(as_source(Cursor(numbered(5)), "training", seed=3))
    before = as_source(Cursor(numbered(5)), "training", seed=3)
    assert before.stateful
    batches = before.batches(0, 0)
    next(batches), next(batches)
    state = before.snapshot()
    rest = [batch.tolist() for batch, _, _ in batches]  # changes in place what it gave as its state
    data = Cursor(numbered(5))
    after = as_source(data, "training", seed=3)
    after.restore(state)
    assert values(after, position=2) == rest == expected[2:]
    assert data.asked == 3
    assert values(after, epoch=1) == values(before, epoch=1)


def test_a_generator_that_was_used_up_says_so() -> None:
    source = as_source((torch.ones(2, 1) for _ in range(2)), "training", seed=0)
    assert len(values(source)) == 2
    with pytest.raises(DataError, match=r"the training data is an iterator and was used up.*max_epochs=1"):
        values(source, epoch=1)


def test_an_iterator_with_a_length_begins_anew_in_each_epoch() -> None:
    class Own:
        def __iter__(self) -> Iterator[Tensor]:
            self.rest = iter(torch.arange(3.0).split(1))
            return self

        def __next__(self) -> Tensor:
            return next(self.rest)

        def __len__(self) -> int:
            return 3

    source = as_source(Own(), "training", seed=0)
    assert not source.one_shot
    assert values(source) == values(source, epoch=1) != []


def test_an_iterable_that_raises_or_cannot_begin_names_the_batch_and_keeps_the_cause() -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.ones(2, 1)
        raise OSError("the disk is gone")

    class Closed:
        def __iter__(self) -> Iterator[Tensor]:
            raise OSError("no connection")

    message = r"the validation \(night\) data raised at batch 1 of epoch 4: OSError: the disk is gone"
    with pytest.raises(DataError, match=message) as caught:
        list(as_source(batches(), "validation (night)", seed=0).batches(4, 0))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DataError, match="training data raised at batch 0 of epoch 2: OSError: no connection"):
        values(as_source(Closed(), "training", seed=0), epoch=2)


class Stream(IterableDataset[Tensor]):
    """Samples split over the workers, each with noise, in an order of the epoch's."""

    def __init__(self, count: int = 6) -> None:
        self.count = count
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.count, step):
            yield torch.tensor([index + 100 * self.epoch + random.random() / 2 + float(torch.rand(())) / 2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_over_an_iterable_dataset_gives_the_same_in_every_run(workers: int) -> None:
    def source() -> Source:
        return as_source(DataLoader(Stream(), batch_size=2, num_workers=workers), "training", seed=3)

    expected = values(source(), epoch=1)
    random.random(), torch.rand(1)
    again = source()
    values(again, epoch=0)
    assert values(again, epoch=1) == expected
    indices = sorted(int(sample[0]) for batch in expected for sample in batch)
    assert indices == [100, 101, 102, 103, 104, 105]  # each once, and the dataset was told the epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_draws_the_same_whatever_the_iterable_drew(workers: int) -> None:
    """The host's generators after a batch, where a step may draw from them."""
    draws = []
    for count in (workers, None):
        data: Any = Noise(4) if count is None else DataLoader(Stream(8), batch_size=2, num_workers=count)
        for _ in as_source(data, "training", seed=3).batches(0, 0):
            draws.append((random.random(), float(np.random.rand())))
    assert draws[:4] == draws[4:]
    assert len(set(draws)) == 4
