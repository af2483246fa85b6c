"""What goes wrong in one process's part of the data is named as it would be for one process."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, TensorDataset

from drivetrain import DataError
from drivetrain.data import Feed, Measure, Share, Transfer, as_source

CPU = Transfer(torch.device("cpu"))


def run(data, rank, ranks, *, position=0, measure=None):
    source = as_source(data, "training", 0, share=Share(rank, ranks))
    for _ in Feed(source, CPU, measure).micro_batches(0, position):
        pass


class Broken(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 11:
            raise ValueError("broken")
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_rank_that_reads_it_meets_a_broken_sample_and_names_its_batch(workers):
    data = DataLoader(Broken(), batch_size=2, num_workers=workers)
    run(data, 0, 2)
    message = re.escape(
        "the training data raised at batch 5 of epoch 0"
        " (samples 10 to 11 of its order, dataset indices [10, 11])"
    ) + (r", in worker 0 \(pid \d+\): ValueError: broken" if workers else ": ValueError: broken")
    with pytest.raises(DataError, match=message):
        run(data, 1, 2)


def test_a_batch_that_an_iterable_fails_to_give_is_named_by_every_rank():
    class Failing:
        def __iter__(self):
            yield torch.arange(2)
            yield torch.arange(2)
            raise ValueError("broken")

    for rank in range(2):
        with pytest.raises(DataError, match=r"raised at batch 2 of epoch 0: ValueError: broken"):
            run(Failing(), rank, 2)


def test_batches_of_an_unknown_kind_are_named_by_their_place_among_all():
    batches = [torch.arange(2)] * 5 + [["words"]]
    run(batches, 0, 2)
    with pytest.raises(DataError, match="batch 5 of epoch 0"):
        run(batches, 1, 2)
    with pytest.raises(DataError, match="batch 5 of epoch 0"):
        run(batches, 2, 3, position=3)
    with pytest.raises(DataError, match="batch 5 of epoch 0"):  # the only one of its round
        run(batches, 3, 5)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_bad_weight_is_named_by_its_batch_where_a_position_counts_samples(rank, ranks):
    data = DataLoader(TensorDataset(torch.arange(24)), batch_size=2)
    measure = Measure(weight=lambda batch: -1.0 if 14 in batch[0] else 1.0)
    with pytest.raises(DataError, match=r"loss_weight gave -1.0 for batch 7 of epoch 0"):
        run(data, rank, ranks, position=8, measure=measure)


def test_an_epoch_without_a_whole_batch_is_empty_for_every_rank():
    data = DataLoader(TensorDataset(torch.arange(3)), batch_size=4, drop_last=True)
    for rank in range(2):
        with pytest.raises(DataError, match="the training data is empty"):
            run(data, rank, 2)


class OwnOrder(DistributedSampler):
    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


class Grouped(Sampler):
    """Divides the data as some libraries' samplers do, which are not torch's."""

    num_replicas = 3

    def __iter__(self):
        return iter(range(0, 12, 3))


class Pairs:
    """A batch sampler of the user's around a sampler that divides."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return zip(*[iter(self.sampler)] * 2, strict=True)


DATA = TensorDataset(torch.arange(12))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"sampler": OwnOrder(DATA, 3, 0)}, "OwnOrder"),
        ({"sampler": Grouped()}, "Grouped"),
        ({"batch_sampler": Pairs(DistributedSampler(DATA, 3, 0))}, "DistributedSampler"),
    ],
)
def test_data_that_is_divided_in_a_way_of_its_own_is_not_divided_once_more(options, kind):
    with pytest.raises(DataError, match=rf"\({kind}\) divides the dataset into 3 parts.*num_replicas=1"):
        run(DataLoader(DATA, **options), 0, 2)


def test_such_a_sampler_of_the_whole_dataset_is_taken():
    for rank in range(2):
        run(DataLoader(DATA, batch_size=2, sampler=OwnOrder(DATA, 1, 0)), rank, 2)


def test_an_evaluation_keeps_to_the_samples_that_a_shuffling_sampler_is_made_of():
    data = DataLoader(DATA, batch_size=2, sampler=RandomSampler(range(5)))
    source = as_source(data, "validation", 0, in_order=True, every_sample=True)
    assert [each.batch[0].tolist() for each in Feed(source, CPU).micro_batches()] == [[0, 1], [2, 3], [4]]
