"""However many processes read the data, and whatever the batch size, they see the same epoch once."""

import itertools
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.messages import warned
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler, SubsetRandomSampler

from drivetrain.core.random_streams import mix
from drivetrain.data import Feed, GlobalCounts, Measure, Shard, Transfer, as_source, evaluation_sources

CPU = Transfer(torch.device("cpu"))


def loader(count, size, **options):
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=size, **options)


def read(data, ranks, *, epoch=0, position=0, measure=None, **options):
    sources = (as_source(data, "training", 3, shard=Shard(rank, ranks), **options) for rank in range(ranks))
    return [list(Feed(each, CPU, measure).micro_batches(epoch, position)) for each in sources]


def numbers(micro_batch):
    batch = micro_batch.batch[0] if isinstance(micro_batch.batch, list) else micro_batch.batch
    return [] if micro_batch.is_placeholder else [int(each) for each in batch]


def in_order(shards):  # all samples, round by round, rank by rank
    return [number for together in zip(*shards, strict=True) for each in together for number in numbers(each)]


@given(
    count=st.integers(1, 40), ranks=st.integers(1, 5), size=st.integers(1, 6), shuffle=st.booleans(),
    drop_last=st.booleans(), epoch=st.integers(0, 2),
)  # fmt: skip
def test_any_number_of_ranks_sees_the_epoch_of_one(count, ranks, size, shuffle, drop_last, epoch):
    data = loader(count, size, shuffle=shuffle, drop_last=drop_last)
    if drop_last and count < size:
        return  # an empty epoch, which is refused
    one = in_order(read(data, 1, epoch=epoch))
    shards = read(data, ranks, epoch=epoch)
    assert in_order(shards) == one
    assert all(len(shard) == len(shards[0]) for shard in shards)
    assert as_source(data, "training", 3, shard=Shard(0, ranks)).count() == len(shards[0])
    for together in zip(*shards, strict=True):
        assert len({each.advance for each in together}) == 1
        if ranks > 1:
            total = sum(each.samples for each in together)
            assert {each.global_counts for each in together} == {GlobalCounts(total, total, 0)}
            assert together[0].advance == total


@given(
    count=st.integers(1, 40), ranks=st.integers(1, 5), size=st.integers(1, 6),
    then_ranks=st.integers(1, 5), then_size=st.integers(1, 6), after=st.integers(0, 6),
)  # fmt: skip
def test_an_epoch_is_resumed_by_another_number_of_ranks_and_batch_size(
    count, ranks, size, then_ranks, then_size, after
):
    first = [shard[:after] for shard in read(loader(count, size, shuffle=True), ranks)]
    position = sum(each.advance for each in first[0])
    if position == count:
        return
    rest = read(loader(count, then_size, shuffle=True), then_ranks, position=position)
    assert in_order(first) + in_order(rest) == in_order(read(loader(count, 1, shuffle=True), 1))


def test_no_rank_is_without_a_batch_and_a_placeholder_counts_nothing():
    shards = read(loader(5, 2), 4)
    assert [numbers(each) for shard in shards for each in shard] == [[0, 1], [2], [3], [4]]
    shards = read(loader(10, 2), 4)
    assert [[numbers(each) for each in shard] for shard in shards] == [
        [[0, 1], [8]], [[2, 3], [9]], [[4, 5], []], [[6, 7], []],
    ]  # fmt: skip
    placeholder = shards[3][1]
    assert placeholder.is_placeholder
    assert (placeholder.weight, placeholder.samples, placeholder.tokens) == (0, 0, 0)
    assert placeholder.batch[0].tolist() == [8]


def test_whole_batches_are_dealt_out_where_short_ones_are_dropped():
    shards = read(loader(11, 2, drop_last=True), 4)
    assert [[numbers(each) for each in shard] for shard in shards] == [
        [[0, 1], [8, 9]], [[2, 3], []], [[4, 5], []], [[6, 7], []],
    ]  # fmt: skip
    # Batch normalisation, for one, refuses a single sample: what stands in is as long as any other batch.
    assert [shard[1].batch[0].tolist() for shard in shards[1:]] == [[8, 9]] * 3


class Own:  # a sampler of the user's, with a length or without one
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


class Sized(Own):
    def __len__(self):
        return self.count


@pytest.mark.parametrize("sampler", [Own(11), Sized(11), SubsetRandomSampler(range(4, 15))])
def test_samplers_of_the_users_are_shared_too(sampler):
    for ranks, drop_last in itertools.product((2, 3), (True, False)):
        data = loader(20, 2, sampler=sampler, drop_last=drop_last)
        assert in_order(read(data, ranks, epoch=1)) == in_order(read(data, 1, epoch=1))


def test_batches_of_a_batch_sampler_stay_whole():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    data = DataLoader(TensorDataset(torch.arange(11)), batch_sampler=batches)
    shards = read(data, 2)
    assert [[numbers(each) for each in shard] for shard in shards] == [
        [batches[0], batches[2], batches[4]],
        [batches[1], batches[3], []],
    ]
    assert [each.advance for each in shards[1]] == [4, 6, 1]
    # Each rank knows the samples of all: nobody has to be asked.
    assert [each.global_counts for each in shards[1]] == [GlobalCounts(each, each, 0) for each in (4, 6, 1)]
    assert in_order(read(data, 3, position=4)) == list(range(4, 11))


def test_ready_batches_of_a_dataset_are_dealt_out_one_to_each():
    batches = [torch.arange(start, start + 3) for start in range(0, 15, 3)]
    shards = read(DataLoader(batches, batch_size=None), 2)
    assert [[numbers(each) for each in shard] for shard in shards] == [
        [[0, 1, 2], [6, 7, 8], [12, 13, 14]],
        [[3, 4, 5], [9, 10, 11], []],
    ]
    assert [each.advance for each in shards[1]] == [2, 2, 1]
    assert [each.samples for each in shards[1]] == [3, 3, 0]
    assert {each.global_counts for each in shards[0]} == {None}  # how long another's batch is, is not known


def test_a_sampler_that_divides_the_data_itself_is_undone():
    data = TensorDataset(torch.arange(12))
    mine = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True)
    plain = DataLoader(data, batch_size=2, sampler=RandomSampler(data))
    assert in_order(read(DataLoader(data, batch_size=2, sampler=mine), 2)) == in_order(read(plain, 1))
    mine = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    assert in_order(read(DataLoader(data, batch_size=2, sampler=mine), 2)) == list(range(12))


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, self.count, step))


@pytest.mark.parametrize("ranks", [2, 3])
def test_iterables_and_lists_are_dealt_out_batch_by_batch(ranks):
    batches = [torch.arange(start, min(start + 3, 20)) for start in range(0, 20, 3)]
    assert in_order(read(batches, ranks)) == list(range(20))
    assert in_order(read(DataLoader(Stream(20), batch_size=3), ranks)) == list(range(20))
    assert in_order(read(batches, ranks, position=2)) == list(range(6, 20))
    with warned("its first 2 batches are drawn again"):
        assert in_order(read(DataLoader(Stream(20), batch_size=3), ranks, position=2)) == list(range(6, 20))


def test_streams_made_by_workers_are_dealt_out_too():
    def made(ranks):
        return read(DataLoader(Stream(10), batch_size=3, num_workers=2), ranks)

    one = in_order(made(1))
    assert sorted(one) == list(range(10))
    assert in_order(made(3)) == one


def cut(lengths):
    ends = list(itertools.accumulate(lengths, initial=0))
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=12), ranks=st.integers(1, 5),
    then_ranks=st.integers(1, 5), after=st.integers(0, 5), listed=st.booleans(),
)  # fmt: skip
def test_batches_of_any_lengths_are_resumed_by_more_or_fewer_ranks(lengths, ranks, then_ranks, after, listed):
    batches, count = cut(lengths), sum(lengths)
    loaded = DataLoader(TensorDataset(torch.arange(count)), batch_sampler=batches)
    data = list(map(torch.tensor, batches)) if listed else loaded
    first = [shard[:after] for shard in read(data, ranks)]
    position = sum(each.advance for each in first[0])
    if position == (len(batches) if listed else count):
        return
    rest = read(data, then_ranks, position=position)
    assert in_order(first) + in_order(rest) == list(range(count))
    assert all(len(shard) == len(rest[0]) for shard in rest)


class Counting:  # a stream that is resumed by its own state
    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.at - 1])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_with_a_state_of_its_own_moves_on_by_whole_rounds_on_every_rank():
    states = []
    for rank in range(2):
        feed = Feed(as_source(Counting(7), "training", 0, shard=Shard(rank, 2)), CPU)
        windows = feed.windows(0)
        next(windows)
        next(windows)
        states.append(feed.snapshot()["data"])
        windows.close()
    assert states == [{"at": 4}, {"at": 4}]
    shards = []
    for rank in range(3):
        source = as_source(Counting(7), "training", 0, shard=Shard(rank, 3))
        source.restore(states[0])
        shards.append([each for window in Feed(source, CPU).windows(0, 4) for each in window.micro_batches])
    assert in_order(shards) == [4, 5, 6]


def test_a_limit_and_the_steps_of_an_epoch_count_rounds():
    source = as_source(loader(100, 4), "training", 0, shard=Shard(1, 3))
    assert source.count() == 9
    assert source.count(96) == 1
    feed = Feed(source, CPU, accumulation=2, limit=5)
    assert (feed.batches_per_epoch, feed.calendar.steps_per_epoch) == (5, 3)
    windows = list(feed.windows(0))
    assert [(len(each.micro_batches), each.last) for each in windows] == [(2, False), (2, False), (1, True)]
    assert sum(each.advance for window in windows for each in window.micro_batches) == 60


class Drawing(Dataset):  # every sample is drawn at random, as an augmentation is
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_batch_draws_is_a_function_of_its_place_in_the_global_order(workers):
    data = DataLoader(Drawing(), batch_size=2, num_workers=workers)
    first, second = read(data, 2)
    for start, drawn in ((0, first[0]), (2, second[0]), (4, first[1]), (8, first[2]), (10, second[2])):
        torch.manual_seed(mix(2, 3, 0, start))
        assert drawn.batch.tolist() == [float(torch.rand(())) for _ in drawn.batch]


@pytest.mark.parametrize("whole", [False, True])
def test_workers_change_nothing(whole):
    options = {"batch_sampler": cut([3, 1, 2, 4, 1])} if whole else {"shuffle": True, "batch_size": 2}
    data = TensorDataset(torch.arange(11))
    here = read(DataLoader(data, **options), 2)
    made = read(DataLoader(data, num_workers=1, **options), 2)
    assert in_order(made) == in_order(here) == in_order(read(DataLoader(data, **options), 1))
    for one, other in zip(made, here, strict=True):
        assert [each[1:] for each in one] == [each[1:] for each in other]


def test_what_travels_to_workers_is_a_batchs_own_indices():
    source = as_source(loader(100_000, 2, shuffle=True), "training", 0, shard=Shard(1, 2))
    indices = next(source.index_batches(0, 0))
    sent = len(ForkingPickler.dumps(indices))
    assert sent < 400
    # Not a view of the order, which would be put into shared memory for it.
    assert not source._order.indices(0).untyped_storage().is_shared()


def test_weights_and_tokens_of_the_task_are_left_to_be_added_up():
    measure = Measure(weight=lambda batch: batch[0].sum(), tokens=lambda batch: 7)
    first, second = read(loader(3, 2), 2, measure=measure)
    assert [(each.weight, each.tokens, each.global_counts) for each in first] == [(1.0, 7, None)]
    assert [(each.weight, each.tokens, each.global_counts) for each in second] == [(2.0, 7, None)]


@given(count=st.integers(1, 40), size=st.integers(1, 8), ranks=st.integers(1, 6))
@example(count=1, size=1, ranks=4)
@example(count=1, size=5, ranks=1)
@example(count=4, size=2, ranks=2)
@example(count=5, size=2, ranks=2)
@example(count=8, size=2, ranks=4)
@example(count=9, size=2, ranks=4)
@example(count=17, size=5, ranks=3)
def test_an_evaluation_has_every_sample_once_in_the_order_of_the_data(count, size, ranks):
    data = loader(count, size, shuffle=True, drop_last=True)
    assert in_order(read(data, ranks, in_order=True, every_sample=True)) == list(range(count))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_keeps_to_the_samples_that_a_shuffling_sampler_is_made_of(ranks):
    data = loader(12, 2, sampler=RandomSampler(range(5)))
    assert in_order(read(data, ranks, in_order=True, every_sample=True)) == list(range(5))


def test_every_named_loader_is_shared():
    data = {"a": loader(5, 2), "b": [torch.arange(3), torch.arange(3, 5)]}
    for name, source in evaluation_sources(data, "validation", 0, shard=Shard(1, 2), every_sample=True):
        found = [numbers(each) for each in Feed(source, CPU).micro_batches()]
        assert found == ([[2, 3], []] if name == "a" else [[3, 4]])
