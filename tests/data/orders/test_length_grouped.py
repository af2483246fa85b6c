"""Orders that put samples of similar lengths into the same step, or batch."""

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain import ConfigError, DataError, LambdaCallback
from drivetrain.data import LengthGroupedSampler, Shard, as_source, by_tokens
from drivetrain.data.orders.length_grouped import lengths_of

LENGTHS = torch.randint(1, 200, (403,), generator=torch.Generator().manual_seed(1)).tolist()


def order(size: int = 4, seed: int = 0) -> list[int]:
    torch.manual_seed(seed)
    return list(LengthGroupedSampler(LENGTHS, size))


def spread(indices: list[int], size: int) -> float:
    groups = [[LENGTHS[each] for each in indices[at : at + size]] for at in range(0, len(indices), size)]
    return sum(max(each) - min(each) for each in groups) / len(groups)


def test_every_sample_comes_once_and_a_step_has_similar_lengths() -> None:
    shuffled = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0)).tolist()
    for size in (1, 4, 32):
        assert sorted(order(size)) == list(range(len(LENGTHS)))
    assert spread(order(4), 4) < spread(shuffled, 4) / 8


def test_steps_come_in_a_random_order_but_for_the_longest() -> None:
    first, second = order(seed=0), order(seed=1)
    assert first != second
    assert max(LENGTHS[each] for each in first[:4]) == max(LENGTHS)
    means = [sum(LENGTHS[each] for each in first[at : at + 4]) for at in range(4, 400, 4)]
    rises = sum(a < b for a, b in pairwise(means))
    assert 30 < rises < 70  # of 98; a sorted order has none


class Rows(Dataset[dict[str, Any]]):
    """Rows with a column of tokens, and columns as a `datasets.Dataset` has them on request."""

    column_names = ()

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return LENGTHS
        torch.rand(1)
        return {"tokens": [0] * LENGTHS[index], "length": torch.tensor(LENGTHS[index]), "empty": None}


class Columns(Rows):
    column_names = ("length",)

    def __getitem__(self, index: Any) -> Any:
        assert index == "length", "a column is read at once"
        return LENGTHS


def test_lengths_come_from_a_column_or_a_function() -> None:
    before = torch.get_rng_state()
    for spec in ("length", "tokens", lambda row: len(row["tokens"])):
        assert lengths_of(Rows(), spec, "training") == LENGTHS
    assert lengths_of(Columns(), "length", "training") == LENGTHS
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(DataError, match="has no such column"):
        lengths_of(Rows(), "lengths", "training")
    with pytest.raises(DataError, match="gave a NoneType"):
        lengths_of(Rows(), "empty", "training")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index / 50), torch.tensor([float(LENGTHS[index])])


def length(sample: Any) -> int:
    return int(sample[1])


def trained(**options: Any) -> list[list[float]]:
    steps: list[list[float]] = []

    def note(run: Any) -> None:
        targets = [part.batch[1].flatten().tolist() for part in run.window.micro_batches]
        steps.append(list(chain(*targets)))

    resume = options.pop("resume", None)
    data = options.pop("data", Samples())
    options = {"group_by_length": length, **options}
    quiet(callbacks=[LambdaCallback(on_step_end=note)], **options).fit(Regression(), data, resume=resume)
    return steps


def test_the_order_does_not_depend_on_how_a_step_is_divided_and_resumes(tmp_path: Path) -> None:
    whole = trained(max_epochs=2, batch_size=8)
    assert whole == trained(max_epochs=2, batch_size=2, gradient_accumulation_steps=4)
    assert whole[:7] != whole[7:]  # another order in another epoch
    orders = []
    for size, ranks in ((8, 1), (4, 2)):
        options: Any = {"batch_size": size, "group_by_length": length, "shard": Shard(0, ranks)}
        orders.append(list(as_source(Samples(), "it", 0, **options)._order.indices(0)))
    assert orders[0] == orders[1]
    halves: Any = {"batch_size": 8, "run_dir": tmp_path, "checkpoint": True}
    assert trained(max_steps=4, **halves) + trained(max_epochs=2, resume="auto", **halves) == whole
    assert sorted(chain(*whole[:7])) == sorted(map(float, LENGTHS[:50]))


def test_batches_by_tokens_are_full_and_as_many_in_each_epoch() -> None:
    first, second = ([*by_tokens(Columns(), 600, lengths="length")] for _ in range(2))
    assert len(first) == len(second) == len(by_tokens(Rows(), 600, lengths=LENGTHS))
    assert sorted(map(sorted, first)) != sorted(map(sorted, second)), "samples of one length change places"
    for batches in (first, second):
        assert sorted(chain(*batches)) == list(range(len(LENGTHS)))
        padded = sorted(len(batch) * max(LENGTHS[each] for each in batch) for batch in batches)
        assert 600 - max(LENGTHS) < padded[1] <= padded[-1] <= 600 < sum(padded) < 1.1 * sum(LENGTHS)
    refused: Any = {
        "tokens=": (0, LENGTHS),
        "='ids'": (9, "ids"),
        "of the 403": (9, [3]),
        "199": (7, LENGTHS),
        "or whole numbers, not ": (9, ["a", "b"]),
        "torch.bool of shape": (9, [True] * 403),
    }
    for words, (tokens, lengths) in refused.items():
        with pytest.raises((ConfigError, DataError), match=words):
            by_tokens(Rows(), tokens, lengths=lengths)
    batches = by_tokens(Rows(), 600, lengths=LENGTHS)
    for data, option in ((Rows(), "sampler"), ([*range(500)], "batch_sampler")):
        loader: Any = DataLoader(data, **{option: batches})  # type: ignore[arg-type]
        with pytest.raises(DataError, match="batch_sampler=by_tokens"):
            as_source(loader, "training", 0)
    with pytest.raises(DataError, match="with a length, not a generator"):
        by_tokens((each for each in "ab"), 9)
