"""What is said when data is of no use, or when a dataset, a sampler or a collation fails."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.indexed import Augmented, ByLength, batches, flat, indices, source
from tests.support.messages import heard
from tests.support.refusals import assert_refused
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

from drivetrain.core.errors import CheckpointError, ConfigError, DataError
from drivetrain.data import (
    Feed,
    Measure,
    Shard,
    Transfer,
    as_source,
    by_tokens,
    evaluation_sources,
    mixture,
    shuffled,
)


def run(
    data: Any, rank: int = 0, ranks: int = 1, epoch: int = 0, position: int = 0, weight: Any = None
) -> None:
    read = as_source(data, "training", 0, shard=Shard(rank, ranks))
    feed = Feed(read, Transfer(torch.device("cpu")), Measure(weight=weight) if weight else None)
    for _ in feed.micro_batches(epoch, position):
        pass


class Unsized(Dataset[Tensor]):
    batch_size = 2


@dataclass
class Held:  # a sample, of which torch makes no batch
    row: int


class Empty(Dataset[Tensor]):
    def __len__(self) -> int:
        return 0


ROWS = TensorDataset(torch.ones(3, 1))
PAIR = torch.ones(2, 1)


def test_data_that_cannot_be_read_is_refused_with_what_is_allowed() -> None:
    def one(data: Any) -> Any:
        return lambda: as_source(data, "training", seed=0)

    def named(data: Any) -> Any:
        return lambda: evaluation_sources(data, "validation", seed=0)

    cases: dict[str, tuple[Any, ...]] = {
        "an empty list": (one([]), "training data is empty", "no batches"),
        "an empty dataset": (one(DataLoader(Empty())), "is empty", "(Empty) has no samples"),
        "no batch size": (one(ROWS), "TensorDataset", "without a batch size", "Trainer(batch_size=32)"),
        "no length": (one(Unsized()), "Unsized", "without a length", "IterableDataset"),
        "a path": (one("path/to/data"), "is a str", "Allowed: a DataLoader"),
        "no loader": (named({}), "mapping without any loader"),
        "a slash": (named({"a/b": [PAIR]}), "'a/b'"),
        "an empty one": (named({"night": []}), "validation (night) data is empty"),
    }
    assert_refused(DataError, cases)


class Iterable:
    def __init__(self, *given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        for each in self.given:
            if isinstance(each, Exception):
                raise each
            yield each


def test_batches_that_cannot_be_used_are_named() -> None:
    """By their number among all batches of the epoch, also after a resume and on each rank."""
    dropping = DataLoader(ROWS, batch_size=4, drop_last=True)
    listed = [PAIR, PAIR, "text"]
    six = [PAIR] * 5 + [["words"]]
    numbered = DataLoader(TensorDataset(torch.arange(24)), batch_size=2)
    failing = Iterable(PAIR, PAIR, ValueError("broken"))

    def bad_weight(batch: Any) -> float:
        return -1.0 if 14 in batch[0] else 1.0

    wrong = "batch 2 of epoch 4 of the training data is a str with no tensor"
    cases: dict[str, tuple[Any, ...]] = {
        "nothing": (lambda: run(Iterable(), epoch=3), "gave no batch in epoch 3", "drop_last=True"),
        "nothing but a short one": (lambda: run(dropping, epoch=3), "is empty", "drop_last=True"),
        "text": (lambda: run(listed, epoch=4), wrong),
        "text of an iterable": (lambda: run(Iterable(*listed), epoch=4), wrong),
        "text after a resume": (lambda: run(listed, position=1), "batch 2 of epoch 0"),
        "of rank 2 after a resume": (lambda: run(six, 2, 3, position=3), "batch 5 of epoch 0"),
        "the only one of its round": (lambda: run(six, 3, 5), "batch 5 of epoch 0"),
        "raises on 1": (lambda: run(failing, 1, 2), "raised at batch 2 of epoch 0: ValueError: broken"),
        "a weight on rank 1": (lambda: run(numbered, 1, 2, 0, 8, bad_weight), "gave -1.0 for batch 7"),
        "a word as weight": (lambda: run([PAIR], weight=lambda batch: "many"), "gave 'many'", "number"),
        "true as weight": (lambda: run([PAIR], weight=torch.any), "loss_weight gave", "one number"),
    }
    assert_refused((ConfigError, DataError), cases)
    run(six, 0, 2)  # reads no such batch


@pytest.mark.parametrize("workers", [0, 1])
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
    assert "ValueError: bad file" in message
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_errors_of_a_group_are_named(workers: int) -> None:
    group = ExceptionGroup("many", [ValueError("bad row"), OSError("no disk")])
    data = DataLoader(Augmented(fails=(3, group)), batch_size=2, num_workers=workers)
    with pytest.raises(DataError, match=r"many \(2 .*: ValueError: bad row; OSError: no disk"):
        run(data)


@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_rank_that_reads_it_meets_a_broken_sample_and_names_its_batch(workers: int) -> None:
    data = DataLoader(Augmented(fails=(8, ValueError("broken"))), batch_size=2, num_workers=workers)
    run(data, 1, 2)
    place = re.escape("batch 4 of epoch 0 (samples 8 to 9 of its order, dataset indices [8, 9])")
    by = r", in worker 0 \(pid \d+\): ValueError: broken" if workers else ": ValueError: broken"
    with pytest.raises(DataError, match=place + by):
        run(data, 0, 2)


def exhausted(samples: list[Tensor]) -> Any:
    raise StopIteration


def broken(samples: list[Tensor]) -> Any:
    raise RuntimeError("sizes differ")


class Broken(ByLength):
    def __iter__(self) -> Iterator[list[int]]:
        raise ValueError("no weights")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_or_a_sampler_that_raises_is_named_and_ends_no_epoch_early(workers: int) -> None:
    runs_out = Augmented(fails=(4, StopIteration()))
    sampler = "the training data's sampler (Broken) raised in epoch 3: ValueError: no weights"

    def read(*arguments: Any, epoch: int = 0, **options: Any) -> Any:
        return lambda: batches(source(*arguments, workers=workers, **options), epoch=epoch)

    cases: dict[str, tuple[Any, ...]] = {
        "a dataset": (
            read(runs_out, shuffle=False),
            "batch 1 of epoch 0",
            "raised StopIteration for index 4",
        ),
        "data classes": (read([Held(1)] * 3), "found <class", "Held'>"),
        "a collate_fn": (read(collate_fn=broken), "batch 0 of epoch 0 (samples 0 to 2", "sizes differ"),
        "one that ends": (read(collate_fn=exhausted), "batch 0 of epoch 0 (samples 0 to 2", "StopIteration"),
        "a sampler": (read(sampler=Broken(), epoch=3), sampler),
        "a batch sampler": (read(batch_sampler=Broken(), epoch=3), sampler),
    }
    assert_refused(DataError, cases)


class OwnOrder(DistributedSampler[Any]):  # a sampler of the user's that divides
    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[::-1])


DATA = TensorDataset(torch.arange(12))


def test_data_that_is_divided_in_a_way_of_its_own_is_not_divided_once_more() -> None:
    with pytest.raises(DataError, match=r"OwnOrder\) divides the dataset into 3 parts.*num_replicas=1"):
        run(DataLoader(DATA, sampler=OwnOrder(DATA, 3, 0)), 0, 2)
    for rank in range(2):  # one that gives the whole dataset is taken
        run(DataLoader(DATA, batch_size=2, sampler=OwnOrder(DATA, 1, 0)), rank, 2)


class Numbers(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.count)[:, None])


class Stateful(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Backwards(Sampler[int]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.data)


WHOLE, LIST = torch.arange(24), list(torch.arange(24).split(4))
SWAPPED = [DataLoader(ConcatDataset([WHOLE[:cut], WHOLE[cut:]]), 4) for cut in (16, 8)]
PARTS = [DataLoader(Subset(WHOLE, range(start, start + 12)), 4) for start in (0, 6)]
SOURCES_SWAPPED = [
    DataLoader(mixture(dict.fromkeys(names, WHOLE), {"a": 1, "b": 1}), 4) for names in ("ab", "ba")
]
BY_TOKENS = [DataLoader(WHOLE, batch_sampler=by_tokens(WHOLE, tokens, lengths=[1] * 24)) for tokens in (6, 8)]
OTHER: dict[str, tuple[Any, Any, str]] = {
    "longer": (
        DataLoader(WHOLE[:20], 4, True),
        DataLoader(WHOLE, 4, True),
        "had 20 samples.*are 24.*Give it the 20",
    ),
    "a list": (
        DataLoader(WHOLE, 4),
        LIST,
        "kind was 'a dataset' and is 'a list of batches'.*end of an epoch",
    ),
    "a loader": (LIST, DataLoader(WHOLE, 4), "kind was 'a list of batches' and is 'a dataset'"),
    "a longer list": (LIST, list(WHOLE.split(2)), "had 6 batches.*are 12"),
    "not shuffled": (DataLoader(WHOLE, 4, True), DataLoader(WHOLE, 4), "order was 'shuffled' and is"),
    "a sampler": (
        DataLoader(WHOLE, 4),
        DataLoader(WHOLE, 4, sampler=Backwards(WHOLE)),
        "that of the program's",
    ),
    "another subset": (*PARTS, "indices of its Subset"),
    "datasets swapped": (*SWAPPED, "lengths in its ConcatDataset"),
    "a stream": (DataLoader(WHOLE, 4), DataLoader(Numbers(24), 4), "is 'an iterable without a state'"),
    "a stream with a state": (Numbers(24), Stateful(24), "is 'an iterable with a state of its own'"),
    "another shuffle buffer": (shuffled(Stateful(24), 8), shuffled(Stateful(24), 6), "buffer=8.*buffer=6"),
    "other shares": (
        mixture({"a": Stateful(24)}, {"a": 1}),
        mixture({"a": Stateful(24), "b": Stateful(24)}, {"a": 1, "b": 1}),
        "a mixture of 'a' by .* and is .*a mixture of 'a', 'b' by",
    ),
    "sources swapped": (*SOURCES_SWAPPED, "a mixture of 'a', 'b' by .* and is .*a mixture of 'b', 'a' by"),
    "batches of other tokens": (*BY_TOKENS, "of 6 tokens, in 4 batches.* and is .*of 8 tokens, in 3"),
    "a stream that ends before": (Numbers(24), Numbers(2), "ends after 2 batches, and 4 were used"),
}


@pytest.mark.parametrize("name", OTHER)
def test_within_an_epoch_other_data_is_refused_and_between_two_it_is_taken(name: str) -> None:
    before, after, words = OTHER[name]

    def feed(data: Any) -> Feed:
        return Feed(as_source(data, "training", 0), Transfer(torch.device("cpu")))

    saved = feed(before)
    next(windows := saved.windows(0))
    state = saved.snapshot()
    windows.close()
    with heard():  # streams without a state are drawn again, and compared
        for data, is_other in ((before, False), (after, True)):
            resumed = feed(data)
            with pytest.raises(CheckpointError, match=words) if is_other else nullcontext():
                resumed.restore(state, 4)
                next(resumed.windows(0, 4))
        resumed = feed(after)
        resumed.restore(state, 0)
        next(resumed.windows(1))
