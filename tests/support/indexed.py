"""A dataset with a length that draws, notes and fails, and short ways to read it."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from drivetrain.data import Source, as_source

SIZE, SEED = 11, 5


class Augmented(Dataset[Tensor]):
    """The index and noise from all of the host's generators; notes in a file what is fetched."""

    def __init__(self, note: Path | None = None, fails: tuple[int, BaseException] | None = None) -> None:
        self.note, self.fails = note, fails

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        if self.note is not None:
            with self.note.open("a", encoding="utf-8") as file:
                file.write(f"{index}\n")
        if self.fails is not None and index == self.fails[0]:
            raise self.fails[1]
        return torch.tensor([index, random.random(), float(np.random.rand()), float(torch.rand(()))])


def loader(dataset: Any = None, workers: int = 0, **options: Any) -> DataLoader[Any]:
    if not {"sampler", "batch_sampler", "shuffle"} & set(options):
        options["shuffle"] = True
    if "batch_sampler" not in options:
        options.setdefault("batch_size", 3)
    return DataLoader(Augmented() if dataset is None else dataset, num_workers=workers, **options)


def source(*arguments: Any, seed: int = SEED, **options: Any) -> Source:
    return as_source(loader(*arguments, **options), "training", seed)


def batches(read: Source, epoch: int = 0, position: int = 0) -> list[Any]:
    return [batch.tolist() for batch, _, _ in read.batches(epoch, position)]


def indices(read: Source, epoch: int = 0, position: int = 0) -> list[list[int]]:
    return [[int(sample[0]) for sample in batch] for batch in batches(read, epoch, position)]


def flat(nested: list[list[int]]) -> list[int]:
    return list(itertools.chain(*nested))


def disturb() -> None:
    random.random()
    np.random.rand(3)
    torch.rand(5)


class ByLength(Sampler[list[int]]):  # batches of different sizes, in a drawn order
    def __iter__(self) -> Iterator[list[int]]:
        made = [[0, 1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
        random.shuffle(made)
        return iter(made)

    def __len__(self) -> int:
        return 4
