"""Data that is not the same on all ranks is refused before it spoils anything; what only looks so is not."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import warned
from tests.support.tasks import Regression, pairs, quiet
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, random_split

from drivetrain import Engine, FSDPConfig, already_split
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
WHOLE = TensorDataset(FEATURES, FEATURES.sum(1, keepdim=True))


class Rows(Dataset[Any]):
    """Samples that are noisy in one way or another."""

    def __init__(self, noise: str = "", first: float = 0.0) -> None:
        self.noise = noise
        self.first = first
        self.own = np.random.default_rng(int(os.environ.get("RANK", 0)))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        features, target = WHOLE[index]
        noise = {"": lambda: 0.0, "global": random.random, "own": self.own.random}[self.noise]()
        return features + noise + self.first, target


class Shard(IterableDataset[Any]):
    def __iter__(self) -> Any:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return (WHOLE[index] for index in range(rank, 32, size))


class Divided(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(int(os.environ["RANK"]), 32, 2))

    def __len__(self) -> int:
        return 16


def given(what: str) -> Any:
    rank = int(os.environ["RANK"])
    if what == "length":
        return pairs(8 + 8 * rank)
    if what == "batch size":
        return pairs(8, batch_size=2 + 2 * rank)
    if what == "drop_last":
        return pairs(8, drop_last=bool(rank))
    if what == "kind":
        return list(pairs(8)) if rank else pairs(8)
    if what == "batches":
        return list(pairs(8 + 8 * rank))
    if what == "list":
        return list(pairs(8, seed=rank))
    if what == "half":
        return DataLoader(TensorDataset(*WHOLE[rank::2]), batch_size=4, shuffle=True)
    if what == "split":
        part = random_split(WHOLE, [0.5, 0.5], generator=torch.Generator().manual_seed(rank))[0]
        return DataLoader(part, batch_size=4, shuffle=True, num_workers=2)
    if what == "sampler":
        return DataLoader(WHOLE, batch_size=4, sampler=Divided())
    if what == "iterable":
        return DataLoader(Shard(), batch_size=4)
    if what == "noisy":
        return DataLoader(Rows("global", first=float(rank)), batch_size=4, num_workers=rank)
    if what == "none":
        return iter(()) if rank else iter(list(pairs(8)))
    return DataLoader(Rows(what), batch_size=4, shuffle=True, num_workers=0 if rank else 1)


def fit(what: str) -> Any:
    trainer = quiet(max_epochs=1, strategy=DDP(world_size=2), devices=2)
    return trainer.fit(Regression(), given(what)).progress.samples


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("length", "the number of samples in its dataset is 8 on rank 0 and 16 on rank 1. Give all ranks"),
        ("batch size", "different training data: its batch size is 2 on rank 0 and 4 on rank 1"),
        ("drop_last", "its drop_last is False on rank 0 and True on rank 1"),
        ("kind", "it is a dataset on rank 0 and a list of batches on rank 1"),
        ("batches", "its number of batches is 4 on rank 0 and 8 on rank 1"),
        ("list", "the training data is not the same on all ranks: its first batch holds"),
        ("half", "its first samples of the same indices hold float32 of shape [4]"),
        ("split", "its first samples of the same indices hold float32 of shape [4]"),
        ("noisy", "its first samples of the same indices hold float32 of shape [4]"),
        ("sampler", "its first indices are [0, 2, 4, 6, ...] on rank 0 and [1, 3, 5, 7, ...] on rank 1"),
        ("iterable", "the training data is not the same on all ranks"),
        ("none", "the training data has no batch on rank 1, but has one on rank 0"),
    ],
)
def test_data_that_differs_between_the_ranks_is_refused(what: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(told)):
        run_distributed(fit, what)


@pytest.mark.parametrize("noise", ["", "global", "own"])
def test_samples_that_are_augmented_are_the_same_data(noise: str) -> None:
    assert run_distributed(fit, noise) == [32, 32]


def validation(what: str) -> None:
    rank = int(os.environ["RANK"])
    trainer = quiet(max_epochs=1, strategy=DDP(world_size=2), devices=2)
    if what == "missing":
        trainer.fit(Regression(), pairs(8), None if rank else pairs(8))
    else:
        trainer.validate(Regression(), {"one": pairs(8), "two": pairs(8 + rank)})


def test_evaluation_data_is_compared_too() -> None:
    with pytest.raises(RuntimeError, match="was given training data and validation data, rank 1 training"):
        run_distributed(validation, "missing")
    with pytest.raises(RuntimeError, match=r"different validation \(two\) data: the number of samples"):
        run_distributed(validation, "named")


def own_loop() -> None:
    engine = Engine(strategy=DDP(world_size=2), devices=2)
    try:
        next(iter(engine.prepare_data(given("half"))))
    finally:
        engine.teardown()


def test_a_loop_of_ones_own_compares_them_too() -> None:
    with pytest.raises(RuntimeError, match="is not the same on all ranks"):
        run_distributed(own_loop)


def whole_as_parts() -> None:
    trainer = quiet(max_epochs=1, strategy=DDP(world_size=2), devices=2)
    with warned("given as already split, but its first batch is the same on rank 0"):
        trainer.fit(Regression(), already_split(pairs(8)))


def test_parts_that_are_the_same_are_warned_of() -> None:
    run_distributed(whole_as_parts)


class Split(Regression):
    """In which two ranks work on the same batches."""

    def parallel_plan(self) -> Any:
        return {"line": RowwiseParallel(input_layouts=Replicate())}


def tensor_groups(neighbours: int) -> Any:
    part = TensorDataset(*WHOLE[int(os.environ["RANK"]) // neighbours :: 4 // neighbours])
    strategy = FSDP(FSDPConfig(tensor_parallel=2), world_size=4)
    trainer = quiet(max_epochs=1, strategy=strategy, devices=4)
    return trainer.fit(Split(), already_split(DataLoader(part, batch_size=4))).progress.samples


def test_ranks_of_a_tensor_group_have_the_same_part() -> None:
    assert run_distributed(tensor_groups, 2, world_size=4) == [32] * 4
    with pytest.raises(RuntimeError, match=r"rank 1 was given another part .*drivetrain\.rank\(\) // 2"):
        run_distributed(tensor_groups, 1, world_size=4)
