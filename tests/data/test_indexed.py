"""Datasets with a length: the order and the batches are functions of the seed, the epoch and the position."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.indexed import (
    SEED,
    SIZE,
    Augmented,
    ByLength,
    batches,
    disturb,
    flat,
    indices,
    loader,
    source,
)
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain.core.random_streams import preserved
from drivetrain.data import Source, as_source


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_the_same_in_any_process_and_after_anything(workers: int) -> None:
    read = source()
    expected = {epoch: batches(read, epoch) for epoch in range(3)}
    other = source(workers=workers)
    for epoch in (2, 0, 1):
        disturb()
        assert batches(other, epoch) == expected[epoch]


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_begins_at_a_position_and_fetches_nothing_before_it(workers: int, tmp_path: Path) -> None:
    expected = batches(source(), epoch=1)
    for position in (3, 9, 11):
        note = tmp_path / f"fetched-{position}"
        note.touch()
        assert batches(source(Augmented(note), workers=workers), 1, position) == expected[-(-position // 3) :]
        fetched = sorted(int(line) for line in note.read_text(encoding="utf-8").split())
        assert fetched == sorted(flat(indices(source(), 1, position)))


def test_another_batch_size_from_a_position_sees_each_remaining_sample_once() -> None:
    order = flat(indices(source(), epoch=2))
    for size in (1, 2, 4, 20):
        rest = indices(source(batch_size=size), 2, position=3)
        assert flat(rest) == order[3:]
        assert [len(batch) for batch in rest[:-1]] == [size] * (len(rest) - 1)


class Evens(Sampler[int]):  # draws in every way that a sampler may, its own generator and the epoch included
    def __init__(self) -> None:
        self.epoch = -1
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        chosen = list(range(0, SIZE, 2))
        random.shuffle(chosen)
        chosen.append(int(np.random.randint(SIZE)))
        chosen.append(int(torch.randint(SIZE, ())))
        chosen.append(int(torch.randint(SIZE, (), generator=self.generator)))
        return iter([*chosen, self.epoch])


EVEN = [1.0] * SIZE
SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "weighted": lambda: WeightedRandomSampler(EVEN, 20),
    "with its own generator": lambda: WeightedRandomSampler(EVEN, 20, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler([1, 4, 5, 7, 9, 10]),
    "with replacement": lambda: RandomSampler(range(SIZE), replacement=True, num_samples=14),
    "part": lambda: RandomSampler(range(SIZE), num_samples=7),
    "of one's own": Evens,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_the_same_in_any_process_and_from_any_position(name: str) -> None:
    make = SAMPLERS[name]
    read = source(sampler=make())
    expected = [batches(read, epoch) for epoch in range(2)]
    assert [[s[0] for s in b] for b in expected[0]] != [[s[0] for s in b] for b in expected[1]]
    for workers in (0, 1) if name == "of one's own" else (0,):
        disturb()
        other = source(sampler=make(), workers=workers)
        assert batches(other, 1, position=3) == expected[1][1:]
        assert batches(other, 0) == expected[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_is_read_from_any_position(workers: int) -> None:
    expected = batches(source(batch_sampler=ByLength()), epoch=1)
    sizes = [len(batch) for batch in expected]
    assert sorted(sizes) == [1, 2, 4, 4]
    read = source(batch_sampler=ByLength(), workers=workers)
    for used in (0, 1, 3) if workers else range(5):
        assert batches(read, 1, position=sum(sizes[:used])) == expected[used:]
    assert [read.count(position) for position in (0, 1)] == [4, None]
    assert not read.exact
    order = flat(indices(source(batch_sampler=ByLength()), epoch=1))
    for position in range(SIZE + 1):  # inside a batch the rest of it is left
        assert flat(indices(source(batch_sampler=ByLength()), 1, position)) == order[position:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_torchs_batch_sampler_passed_by_hand_is_what_the_loader_would_make(drop_last: bool) -> None:
    passed = BatchSampler(RandomSampler(range(SIZE)), 4, drop_last)
    by_hand = source(batch_sampler=passed)
    made = source(batch_size=4, drop_last=drop_last)
    assert batches(by_hand, 1) == batches(made, 1)
    assert by_hand.exact
    assert by_hand.count() == made.count() == (2 if drop_last else 3)


class Ready(Dataset[Tensor]):  # gives whole batches, for a loader with batch_size=None
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int | list[int]) -> Tensor:
        rows = torch.tensor(index if isinstance(index, list) else [index] * 2).float()
        return torch.stack([rows, torch.rand(len(rows))], dim=1)

    def __getitems__(self, many: list[int]) -> Any:
        raise AssertionError("torch does not ask for several ready batches together")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_ready_batches_counts_batches(workers: int) -> None:
    read = source(Ready(), batch_size=None, workers=workers)
    expected = batches(source(Ready(), batch_size=None), epoch=1)
    assert len(expected) == 4
    assert batches(read, 1, position=1) == expected[1:]
    # How many samples are in it, only a look at the batch tells.
    assert [(advance, samples) for _, advance, samples in read.batches(0, 0)] == [(1, None)] * 4


class Many(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitems__(self, many: list[int]) -> list[int]:
        return [index * len(many) for index in many]


def test_datasets_that_fetch_a_batch_at_once_are_asked_to() -> None:
    found = batches(source(Many(), shuffle=False, batch_size=6))
    assert found == [list(range(0, 36, 6)), list(range(30, 51, 5))]


def test_a_dataset_can_be_read_in_its_own_order() -> None:
    for options in ({}, {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 3, False)}):
        read = as_source(loader(**options), "predict", 0, in_order=True)
        assert indices(read, epoch=1) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


class Reversed(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(SIZE))


def test_a_prediction_reads_the_samples_that_a_training_would_read() -> None:
    everything = range(SIZE)
    for options in (
        {"batch_sampler": BatchSampler(SequentialSampler(everything), 4, True)},
        {"batch_sampler": [[7], [9, 8]]},
        {"batch_sampler": ByLength()},
        {"sampler": Reversed(everything)},
        {"sampler": RandomSampler(everything, num_samples=4)},
        {"sampler": RandomSampler(everything, replacement=True)},
    ):
        predicted = as_source(loader(**options), "predict", SEED, in_order=True, every_sample=True)
        assert indices(predicted) == indices(source(**options)), options
    subset = as_source(loader(sampler=SubsetRandomSampler([7, 9, 8, 2])), "predict", SEED, in_order=True)
    assert indices(subset) == [[2, 7, 8], [9]]  # torch's class shuffles them, so they have no order


def test_workers_that_stay_give_the_same_over_epochs_an_early_end_and_a_resume() -> None:
    expected = [batches(source(), epoch) for epoch in range(3)]
    read = source(workers=2, persistent_workers=True)
    assert batches(read, 0) == expected[0]
    taken = read.batches(1, 0)
    assert next(taken)[0].tolist() == expected[1][0]
    del taken  # as a limit does: what was made ahead is not used
    assert batches(read, 1, position=6) == expected[1][2:]
    assert batches(read, 2) == expected[2]
    read.close()


def step_draws(read: Source, position: int = 0) -> list[tuple[float, ...]]:
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: E731
    return [draw() for _ in read.batches(0, position)]


def test_a_step_draws_the_same_for_any_number_of_workers_and_not_what_the_batch_drew() -> None:
    # Of Python's and numpy's generators; torch's is seeded for every step.
    draws = [each[:2] for each in step_draws(source())]
    assert [each[:2] for each in step_draws(source(workers=2))] == draws
    assert [each[:2] for each in step_draws(source(), position=6)] == draws[2:]
    assert len({each[0] for each in draws}) == len(draws)
    drawn_by_data = {sample[1] for batch in batches(source()) for sample in batch}
    assert not drawn_by_data & {torch.tensor(each[0]).item() for each in draws}


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_cannot_draw_leaves_the_steps_streams_alone(workers: int) -> None:
    dataset = Subset(TensorDataset(torch.arange(9.0).unsqueeze(1)), range(9))
    with preserved():
        expected = [(random.random(), float(np.random.rand()), float(torch.rand(()))) for _ in range(3)]
    assert step_draws(source(dataset, workers=workers)) == expected
