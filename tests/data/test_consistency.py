"""Data that is not the same on all ranks is refused before it spoils anything; what only looks so is not."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import drivetrain
from drivetrain import DataError, Engine
from drivetrain.data import Feed, Shard, Transfer, as_source
from drivetrain.data.consistency import check_data
from drivetrain.data.fingerprint import fingerprint, matches
from drivetrain.distributed.ranks import Ranks
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
WHOLE = TensorDataset(FEATURES, FEATURES.sum(1, keepdim=True))


class Rows(Dataset[Any]):
    def __init__(self, noise: str = "", first: float = 0.0) -> None:
        self.noise, self.first = noise, first
        self.own = np.random.default_rng(drivetrain.rank())

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        features, target = WHOLE[index]
        noise = {"": lambda: 0.0, "global": random.random, "own": self.own.random}[self.noise]()
        return features + noise + self.first, target


class OwnPart(IterableDataset[Any]):  # a rank's part of a stream
    def __iter__(self) -> Any:
        return (WHOLE[index] for index in range(drivetrain.rank(), 32, 2))


DIFFERENT: dict[str, tuple[Any, str]] = {
    "length": (lambda rank: pairs(8 + 8 * rank), "samples in its dataset is 8 on rank 0 and 16 on rank 1"),
    "batch size": (lambda rank: pairs(8, 2 + 2 * rank), "batch size is 2 on rank 0 and 4 on rank 1"),
    "kind": (lambda rank: [pairs(8), list(pairs(8))][rank], "a dataset on rank 0 and a list of batches on"),
    "list": (lambda rank: list(pairs(8, seed=rank)), "not the same on all ranks: its first batch holds"),
    "half": (
        lambda rank: DataLoader(TensorDataset(*WHOLE[rank::2]), batch_size=4, shuffle=True),
        "its first samples of the same indices hold float32 of shape [4]",
    ),
    "noisy": (
        lambda rank: DataLoader(Rows("global", first=float(rank)), batch_size=4),
        "its first samples of the same indices hold float32 of shape [4]",
    ),
    "sampler": (
        lambda rank: DataLoader(WHOLE, batch_size=4, sampler=list(range(rank, 32, 2))),
        "its first indices are [0, 2, 4, 6, ...] on rank 0 and [1, 3, 5, 7, ...] on rank 1",
    ),
    "iterable": (lambda rank: DataLoader(OwnPart(), batch_size=4), "training data is not the same on all"),
    "none": (lambda rank: iter(() if rank else list(pairs(8))), "has a batch on rank 0, but none on rank 1"),
}


def trainer() -> Any:
    return quiet(max_epochs=1, strategy=DDP(world_size=2), devices=2)


def refusal(make: Any) -> str:
    """What is said of data, before a run and on its first batches; each rank has the same."""
    ranks = Ranks.of_job()
    source = as_source(make(ranks.rank), "training", 0, shard=Shard(ranks.rank, ranks.size))
    feed = Feed(source, Transfer(torch.device("cpu")))
    try:
        check_data([feed], ranks)
        for _ in feed.windows(0):
            pass
    except DataError as error:
        return str(error)
    finally:
        feed.close()
    return "no error"


def test_data_that_differs_between_the_ranks_is_refused() -> None:
    both = on_two_ranks(lambda: {name: refusal(make) for name, (make, _) in DIFFERENT.items()})
    for found in both:
        assert not [found[name] for name, (_, words) in DIFFERENT.items() if words not in found[name]]


def fits_differently() -> None:
    named = {"one": pairs(8), "two": pairs(8 + drivetrain.rank())}
    trainer().fit(Regression(), pairs(8), named)


def own_loop() -> None:
    engine = Engine(strategy=DDP(world_size=2), devices=2)
    try:
        next(iter(engine.prepare_data(DIFFERENT["half"][0](drivetrain.rank()))))
    finally:
        engine.teardown()


def test_a_fit_with_its_validation_data_and_a_loop_of_ones_own_compare_data() -> None:
    with pytest.raises(RuntimeError, match=r"different validation \(two\) data: the number of samples"):
        run_distributed(fits_differently)
    with pytest.raises(RuntimeError, match="is not the same on all ranks"):
        run_distributed(own_loop)


def test_a_fit_with_validation_data_on_one_rank_alone_is_refused() -> None:
    def fits() -> None:
        trainer().fit(Regression(), pairs(8), None if drivetrain.rank() else pairs(8))

    with pytest.raises(RuntimeError, match="has training data and validation data, rank 1 training"):
        run_distributed(fits)


def test_samples_that_are_augmented_are_the_same_data() -> None:
    def fits() -> list[int]:
        loaders = (DataLoader(Rows(noise), batch_size=8, shuffle=True) for noise in ("global", "own"))
        return [trainer().fit(Regression(), each).progress.samples for each in loaders]

    assert on_two_ranks(fits) == [[32] * 2] * 2


@dataclass
class Pair:
    image: Any
    label: int


IMAGE = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_what_differs_is_told_apart() -> None:
    different: tuple[tuple[Any, Any], ...] = (
        (IMAGE, IMAGE.flip(0)),
        (IMAGE, IMAGE.double()),
        ((IMAGE, torch.tensor(1)), (IMAGE, torch.tensor(2))),
        ({"x": 10_000}, {"x": 10_001}),
        (Pair(IMAGE, 1), Pair(IMAGE, 2)),
        (np.arange(5), np.arange(1, 6)),
        ("a line of text", "another"),
        ([b"bytes"], [b"byte"]),
        (torch.zeros(2), torch.zeros(3)),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
    )
    for one, other in different:
        assert matches(fingerprint(one), fingerprint(one))
        assert not matches(fingerprint(one), fingerprint(other)), (one, other)


def test_what_machines_make_differently_is_not_told_apart() -> None:
    same: tuple[tuple[Any, Any], ...] = (
        (IMAGE, IMAGE * (1 + 1e-6)),
        ({"x": IMAGE, "path": "/one/cat.png"}, {"x": IMAGE, "path": "/other/cat.png"}),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
        (object(), object()),
        (torch.empty(0), torch.empty(0)),
        (np.array(["a"]), np.array(["b"])),
    )
    assert all(matches(fingerprint(one), fingerprint(other)) for one, other in same)
