"""The order of a dataset in each epoch; samplers of the user's: endless ones, and those that choose."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import warned
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SubsetRandomSampler

from drivetrain import CheckpointError
from drivetrain.data import Feed, Transfer, as_source
from drivetrain.data.orders.order import Order
from drivetrain.data.orders.shuffle import FormulaOrder

SIZE = 7


class Endless(Sampler[int]):  # draws from all of the host's generators and never ends
    def __iter__(self) -> Iterator[int]:
        while True:
            drawn = random.randrange(SIZE), int(np.random.randint(SIZE)), int(torch.randint(SIZE, ()))
            yield sum(drawn) % SIZE


class EndlessBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return ([index] * (1 + index % 2) for index in Endless())


class Numbers(Dataset[int]):  # gives its indices, until a worker has opened it
    opened = False

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return -1 if self.opened else index


def first(count: int, epoch: int = 0, position: int = 0, **options: Any) -> list[list[int]]:
    read = as_source(DataLoader(Numbers(), **options), "training", 5)
    found = [batch.tolist() for batch, _, _ in itertools.islice(read.batches(epoch, position), count)]
    read.close()
    return found


def test_the_generator_of_a_loader_or_sampler_counts_and_keeps_its_seed() -> None:
    for make in (
        lambda own: DataLoader(Numbers(), shuffle=True, generator=own),
        lambda own: DataLoader(Numbers(), sampler=SubsetRandomSampler(range(SIZE), own)),
    ):
        loaders = [make(torch.Generator().manual_seed(seed)) for seed in range(5)] * 2
        read = [as_source(each, "training", 5).batches(1, 0) for each in loaders]
        orders = [str([each[0].tolist() for each in batches]) for batches in read]
        assert orders[:5] == orders[5:]
        assert len(set(orders)) == 5


def test_a_sampler_that_gives_more_or_less_than_its_length_is_named_once_in_any_epoch() -> None:
    class Changing(Sampler[Any]):
        given: tuple[list[int], ...] = ([0], [1], [2])

        def __iter__(self) -> Iterator[Any]:
            return iter(self.given)

        def __len__(self) -> int:
            return 3

    sampler = Changing()
    read = as_source(DataLoader(Numbers(), batch_sampler=sampler), "training", 5)
    assert len(list(read.batches(0, 0))) == 3
    sampler.given = ([0], [1])
    with warned(r"sampler \(Changing\) gave 2 entries in epoch 1, and its length is 3") as found:
        assert [len(list(read.batches(epoch, 0))) for epoch in (1, 2)] == [2, 2]
    assert len(found) == 1


def test_shuffled_epochs_differ_and_each_is_itself_in_any_process_and_after_a_resume() -> None:
    shuffled: dict[str, Any] = {"shuffle": True, "batch_size": 2}
    epochs = [first(9, epoch, **shuffled) for epoch in range(4)]
    flat = [tuple(itertools.chain(*each)) for each in epochs]
    assert len(set(flat)) == 4
    assert [sorted(each) for each in flat] == [list(range(SIZE))] * 4
    torch.rand(3), random.random(), np.random.rand()
    for epoch in (3, 1):
        assert first(9, epoch, **shuffled) == epochs[epoch]
        assert first(9, epoch, position=4, **shuffled) == epochs[epoch][2:]
    order = Order("training", RandomSampler(range(SIZE)), SIZE, seed=5)
    assert [tuple(order.indices(epoch).tolist()) for epoch in range(4)] == flat
    other = Order("training", RandomSampler(range(SIZE)), SIZE, seed=6)
    assert tuple(other.indices(0).tolist()) != flat[0]


def test_many_samples_are_shuffled_by_a_formula_which_is_found_at_any_position() -> None:
    for length in (2, 3, 5, 8, 9, 1_000, 4_097, 70_001):
        order = FormulaOrder(length, seed=length)
        whole = order[0:length]
        assert torch.equal(whole.sort().values, torch.arange(length)), length
        assert torch.equal(torch.cat([order[at : at + 997] for at in range(0, length, 997)]), whole)
        assert order[length : length + 3].tolist() == []
        assert length < 9 or not torch.equal(whole, FormulaOrder(length, seed=length + 1)[0:length])
    places = np.arange(70_001)
    assert abs(np.corrcoef(whole, places)[0, 1]) < 0.02
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.02


def test_a_hundred_million_samples_need_no_list_and_an_older_order_of_them_is_refused() -> None:
    def feed() -> Feed:  # 763 MiB and many seconds as a list
        return Feed(
            as_source(DataLoader(range(10**8), 4, True), "training", 5), Transfer(torch.device("cpu"))
        )  # type: ignore[arg-type]

    read = feed()
    epochs = [next(read.windows(epoch, 10**7)).micro_batches[0].batch.tolist() for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    state = read.snapshot()
    feed().restore(state, 10**7)
    del state["data_continues"]["settings"]
    with pytest.raises(CheckpointError, match="its order was 'shuffled' and is 'shuffled by a formula' now"):
        feed().restore(state, 10**7)
    feed().restore(state, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_may_be_endless_and_is_resumed_anywhere(workers: int) -> None:
    expected = first(12, sampler=Endless(), batch_size=3)
    assert [len(batch) for batch in expected] == [3] * 12
    read = as_source(DataLoader(Numbers(), sampler=Endless(), batch_size=3), "training", 5)
    assert (read.count(), read.exact) == (None, False)
    assert expected != first(12, epoch=1, sampler=Endless(), batch_size=3)
    random.seed(99)
    resumed = first(4, position=24, sampler=Endless(), batch_size=3, num_workers=workers)
    assert resumed == expected[8:]
    expected = first(12, batch_sampler=EndlessBatches())
    used = sum(map(len, expected[:8]))
    assert first(4, position=used, batch_sampler=EndlessBatches(), num_workers=workers) == expected[8:]


def open_dataset(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.opened = True  # type: ignore[union-attr]


def test_worker_init_fn_is_called_and_finds_the_users_dataset() -> None:
    assert first(9, num_workers=1, batch_size=7, worker_init_fn=open_dataset) == [[-1] * SIZE]


def test_an_order_longer_than_is_drawn_at_once_goes_on_in_its_own_stream() -> None:
    """What others draw between two pieces does not move it, and it does not move them."""
    order = Order("training", Endless(), SIZE, seed=3)
    expected = list(itertools.islice(order.drawn(Endless(), 0), 30_000))
    drawn = order.drawn(Endless(), 0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    right = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = list(itertools.islice(drawn, 15_000))
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == right
    assert [*found, *itertools.islice(drawn, 15_000)] == expected
    assert expected[:10_000] != expected[10_000:20_000]
