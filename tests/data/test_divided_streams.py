"""Streams that can be divided are read in parts, each sample by one rank; also those made of such streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import drivetrain
from drivetrain import CheckpointError, Engine, LambdaCallback, TaskModule, already_split
from drivetrain.data import mixture, packed, shuffled
from drivetrain.strategies.ddp import DDP

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Files(IterableDataset[Any]):
    """Documents in files, with a position."""

    def __init__(self, files: list[list[int]], key: str = "id") -> None:
        self.files, self.key, self.at, self.read = files, key, 0, list[int]()

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "Files":
        part = Files(self.files[index::num_shards], self.key)
        part.read = self.read
        return part

    def __iter__(self) -> Iterator[Any]:
        samples = [each for file in self.files for each in file]
        while self.at < len(samples):
            self.at += 1
            self.read.append(samples[self.at - 1])
            yield {self.key: [self.read[-1]] * 2 if self.key == "input_ids" else torch.tensor(self.read[-1])}
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def files(count: int = 5, samples: int = 23, first: int = 0, key: str = "id") -> Files:
    numbers = list(range(first, first + samples))
    return Files([numbers[index::count] for index in range(count)], key)


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        return self.weight * next(iter(batch.values())).double().mean()

    validation_step = training_step


def fit(data: Any, stop: int | None = None, key: str = "id", **options: Any) -> list[int]:
    seen: list[int] = []

    def note(run: Any) -> None:
        for each in run.window.micro_batches:
            seen.extend(
                [] if each.is_placeholder else each.batch[key].reshape(each.samples, -1)[:, 0].tolist()
            )
        if run.progress.steps == stop:
            run.stop("for the test")

    options = {"max_epochs": 1, "batch_size": None if isinstance(data, DataLoader) else 2, **options}
    options = {"strategy": DDP(world_size=2), "devices": 2} | options
    trainer = quiet(callbacks=[LambdaCallback(on_step_end=note)], **options)
    trainer.fit(Task(), data, resume="auto" if "run_dir" in options else None)
    return seen


def of_many() -> Any:
    """What each of several kinds gives here, and what is read of it."""
    found, bare = {}, files()
    found["bare"] = fit(bare), bare.read
    loaded = files()
    found["in a loader"] = fit(DataLoader(loaded, batch_size=2)), loaded.read
    few = files(count=1)
    found["fewer shards than ranks"] = fit(few), few.read
    mixed = {"a": files(), "b": files(count=2, first=23, samples=17)}
    both = mixture(mixed, {"a": 23, "b": 17}, until="all")
    found["mixture"] = fit(both), mixed["a"].read + mixed["b"].read
    documents = files(key="input_ids")
    found["packed"] = fit(packed(documents, 2, buffer=2), key="input_ids"), documents.read
    reordered = files()
    found["shuffled"] = fit(shuffled(reordered, 5)), reordered.read
    made = already_split(lambda rank, size: files().shard(size, rank))
    found["already_split"] = fit(made), []
    engine, alone = Engine(strategy=DDP(world_size=2), devices=2), files(count=4, samples=16)
    own = torch.cat([each["id"] for each in engine.prepare_data(DataLoader(alone, batch_size=2))])
    found["a loop of one's own"] = own.tolist(), alone.read
    engine.teardown()
    evaluated = files(samples=20)
    quiet(strategy=DDP(world_size=2), devices=2, batch_size=2).validate(Task(), evaluated)
    found["evaluation"] = list(range(drivetrain.rank(), 20, 2)), evaluated.read
    return found


def test_each_rank_reads_its_own_shards_and_no_sample_is_lost_or_comes_twice() -> None:
    one, other = on_two_ranks(of_many)
    counts = {"mixture": 40, "a loop of one's own": 16, "evaluation": 20}
    for kind, (seen, read) in one.items():
        more, rest = other[kind]
        whole = counts.get(kind, 23)
        if kind == "mixture":  # a source begins anew until the other has ended too, on each rank
            assert {*seen, *more} == set(range(whole))
            assert not {*seen} & {*more}
        else:
            assert (kind, sorted(seen + more)) == (kind, list(range(whole)))
        is_whole = kind in ("fewer shards than ranks", "evaluation")
        if read:
            assert (kind, is_whole) == (kind, len({*rest}) == whole), "the first sample is read on both"


def interrupted(directory: Path) -> Any:
    given = {"max_epochs": 2, "checkpoint": True}
    whole = fit(files(), run_dir=directory / "whole", **given)
    parts = [  # at step 6 of 7 the part of rank 1 has ended
        each for stop in (6, 9) for each in fit(files(), stop, run_dir=directory / "parts", **given)
    ]
    within = fit(files(), 2, run_dir=directory / "within", checkpoint=True)
    limited = fit(files(), run_dir=directory / "limited", checkpoint=True, limit_train_batches=2)
    epoch = fit(files(), run_dir=directory / "epoch", checkpoint=True)
    return whole, parts + fit(files(), run_dir=directory / "parts", **given), epoch, within, limited


def test_a_resume_within_an_epoch_needs_as_many_ranks_one_between_epochs_any_number(
    tmp_path: Path,
) -> None:
    found = on_two_ranks(interrupted, tmp_path)
    for whole, parts, *_ in found:
        assert whole == parts
    assert sorted(found[0][2] + found[1][2]) == [*range(23)]
    alone: dict[str, Any] = {"devices": 1, "strategy": "auto", "checkpoint": True}
    message = "data was divided over 2 ranks and this run's is not divided.*end of an epoch"
    for name in ("within", "limited"):
        with pytest.raises(CheckpointError, match=message):
            fit(files(), run_dir=tmp_path / name, max_epochs=2, **alone)
    assert sorted(fit(files(), run_dir=tmp_path / "epoch", max_epochs=2, **alone)) == [*range(23)]
    back = on_two_ranks(lambda: fit(files(), run_dir=tmp_path / "epoch", max_epochs=3, checkpoint=True))
    assert sorted(back[0] + back[1]) == [*range(23)]


def test_streams_that_differ_between_ranks_are_refused() -> None:
    words = "different training data: the first sample is .*, 0 on rank 0 and .*, 1 on rank 1.*already_split"
    with pytest.raises(RuntimeError, match=words):
        on_two_ranks(lambda: fit(files(count=10).shard(2, drivetrain.rank())))
