"""Batches that cannot be made: named in an error, or left out by all processes alike, and counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import FEATURES, Regression, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

import drivetrain
from drivetrain import CheckpointConfig, DataError, LambdaCallback, OptimizerConfig, TaskModule, already_split
from drivetrain.data.skipped_batches import IN_A_ROW

ADAMW = OptimizerConfig("adamw", lr=0.05)


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Samples of which some, given by their indices, cannot be read; all, or only those to keep."""

    error: type[Exception] = OSError

    def __init__(self, bad: tuple[int, ...] = (), size: int = 24, keep: list[int] | None = None) -> None:
        self.bad = bad
        self.features = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(0))
        self.keep = list(range(size)) if keep is None else keep

    def __len__(self) -> int:
        return len(self.keep)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        index = self.keep[number]
        if index in self.bad:
            raise self.error(f"sample {index} is cut short")
        return self.features[index], self.features[index].sum(0, keepdim=True)


def loader(*bad: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Lines(bad), batch_size=batch_size, **options)


def windows_of(data: Lines, *windows: list[int]) -> list[Any]:
    return [default_collate([data[index] for index in window]) for window in windows]


def left_out(*data: Any, task: Any = None, **options: Any) -> tuple[Any, Any]:
    task = Regression(ADAMW) if task is None else task
    with heard("the batch is left out"):
        result = quiet(**{"max_epochs": 1, "on_bad_batch": "skip", **options}).fit(task, *data)
    return task, result


@pytest.mark.parametrize("workers", [0, 1])
def test_the_run_is_that_of_the_data_without_its_bad_batches(workers: int) -> None:
    task, result = left_out(loader(7, 20, num_workers=workers))
    kept = [index for index in range(24) if index not in (6, 7, 20, 21)]
    without = Regression(ADAMW)
    quiet(max_epochs=1).fit(without, DataLoader(Lines(keep=kept), batch_size=2))
    assert weights(task) == weights(without)
    progress = result.progress
    assert (progress.bad_batches, progress.steps, progress.micro_batches) == (2, 10, 12)
    assert (progress.samples, progress.skipped) == (20, 2)
    assert result.metrics["train/bad_batches"] == 2


def test_within_a_window_the_others_weigh_what_they_have() -> None:
    """Micro-batches of 4 and of 3, as the second is bad and the sixth is the last."""
    data = DataLoader(Lines((5,), size=23), batch_size=4)
    task, result = left_out(data, gradient_accumulation_steps=3)
    kept = [index for index in range(23) if index not in (4, 5, 6, 7)]
    without = Regression(ADAMW)
    quiet(max_epochs=1).fit(without, windows_of(Lines(size=23), kept[:8], kept[8:]))
    for name, value in without.state_dict().items():
        torch.testing.assert_close(task.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    assert (result.progress.steps, result.progress.bad_batches) == (2, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_is_the_undisturbed_one(workers: int, tmp_path: Path) -> None:
    """Resumed before a bad batch, in its place, and after it; the position moves over it."""

    def options(name: str) -> dict[str, Any]:
        config = CheckpointConfig(every="1 steps", keep_last=None, by=None)
        return {"max_epochs": 2, "checkpoint": config, "run_dir": tmp_path / name}

    data = loader(7, 20, shuffle=True, num_workers=workers)
    whole, result = left_out(data, **options("whole"))
    saved = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert len(saved) == result.progress.steps == 20
    for place in (3, 6, 13):
        task = Regression(ADAMW)
        trainer = quiet(**options(f"from {place}"), on_bad_batch="skip")
        with heard("the batch is left out"):
            again = trainer.fit(task, data, resume=str(saved[place]))
        assert weights(task) == weights(whole)
        again.progress.seconds = result.progress.seconds
        assert again.progress == result.progress


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_is_all_or_too_often_bad_ends_with_an_error(workers: int) -> None:
    """By the number in a row; in a short epoch as one that has taught nothing; by the share of all."""

    class Lacking(Lines):
        error = MemoryError

    def skips(size: int, bad: range, batch_size: int, epochs: int) -> Any:
        data = DataLoader(Lines(tuple(bad), size=size), batch_size=batch_size, num_workers=workers)
        return lambda: left_out(data, max_epochs=epochs)

    half = "11 of 21 batches were bad, more than 10%", "Repair the data"
    cases = {
        "all": (skips(24, range(24), 1, 1), f"last {IN_A_ROW} batches were all bad"),
        "too little memory": (lambda: left_out(DataLoader(Lacking((3,)), batch_size=2)), "MemoryError"),
        "all of few": (skips(24, range(24), 8, 9), "none of them could be made"),
        "half": (skips(60, range(0, 60, 2), 1, 1), *half),
    }
    assert_refused(DataError, cases)


BAD_OF_STREAM = (3, 9, 10)


class Stream(IterableDataset[Any]):
    """The numbers below 22 without a state, of which some raise; an iterator that goes on, or a generator."""

    num_shards = 2

    def __init__(self, numbers: Any = range(22), generator: bool = False, bad: Any = BAD_OF_STREAM) -> None:
        self.numbers, self.generator, self.bad = numbers, generator, bad

    def shard(self, size: int, rank: int) -> Any:
        return Stream(self.numbers[rank::size])

    def __iter__(self) -> Any:
        worker = get_worker_info()
        own = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        return (self.read(each) for each in own) if self.generator else map(self.read, own)

    def read(self, number: int) -> Tensor:
        if number in self.bad:
            raise OSError(f"sample {number} is cut short")
        return torch.as_tensor(number)


class WithState(Stream):
    at = 0

    def __iter__(self) -> Any:  # a generator, which is begun again from its state
        while self.at < len(self.numbers):
            self.at += 1
            yield self.read(self.numbers[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def checked(samples: list[Tensor]) -> Tensor:
    if any(int(each) in BAD_OF_STREAM for each in samples):
        raise ValueError("the batch is bad")
    return torch.stack(samples)


class Loop(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.weight * batch.double().mean()


def read_of(data: Any, stop: int | None = None, **options: Any) -> tuple[list[int], int]:
    seen: list[int] = []

    def note(run: Any) -> None:
        own = (each for each in run.window.micro_batches if not each.is_placeholder)
        seen.extend(number for each in own for number in each.batch.flatten().tolist())
        if run.progress.steps == stop:
            run.stop("for the test")

    options |= {"max_epochs": 1, "callbacks": [LambdaCallback(on_step_end=note)], "on_bad_batch": "skip"}
    with heard():
        result = quiet(**options).fit(Loop(), data, resume="auto" if "run_dir" in options else None)
    return seen, result.progress.bad_batches


GOOD = [each for each in range(22) if each not in BAD_OF_STREAM]
STREAMS: dict[str, Any] = {
    "samples": (Stream, {"batch_size": 4}),
    "samples with a state": (WithState, {"batch_size": 4}),
    "a loader": (lambda: DataLoader(Stream(), 4), {}),
    "a loader with workers": (lambda: DataLoader(Stream(), 4, num_workers=2), {}),
    "batches": (lambda: Stream(torch.arange(22)[:, None]), {}),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_after_samples_that_raise_and_loses_no_other(kind: str, tmp_path: Path) -> None:
    make, options = STREAMS[kind]
    seen, bad = read_of(make(), **options)
    assert (sorted(seen), bad) == (GOOD, len(BAD_OF_STREAM))
    options = options | {"checkpoint": True, "run_dir": tmp_path}
    assert read_of(make(), 2, **options)[0] + read_of(make(), **options)[0] == seen


def test_each_of_two_ranks_leaves_samples_of_its_part_out_and_a_collate_function_may_raise() -> None:
    found = on_two_ranks(lambda: read_of(Stream(), batch_size=4, strategy="ddp", devices=2))
    assert sorted(found[0][0] + found[1][0]) == GOOD
    assert [each[1] for each in found] == [3, 3]
    for workers in (0, 2):
        data = DataLoader(Stream(bad=()), 1, collate_fn=checked, num_workers=workers)
        assert read_of(data) == (GOOD, 3)


def test_a_stream_that_cannot_go_on_ends_the_run_and_names_the_place() -> None:
    own_loader = type("OwnLoader", (DataLoader,), {})
    at_its_end = "sample 3 is cut short; then the iterator of Stream was at its end, as a generator is when"

    class Late(WithState):
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = 3

    cases = {
        "a generator": (lambda: read_of(Stream(generator=True), batch_size=4), at_its_end),
        "in a worker": (
            lambda: read_of(DataLoader(Stream(generator=True), 4, num_workers=2)),
            "batch 1 of epoch 0, in worker 1",
            at_its_end,
        ),
        "its state is late": (
            lambda: read_of(Late(), batch_size=4),
            "10 samples in a row raised",
            "sample 3",
        ),
        "a loader of another kind": (lambda: read_of(own_loader(Stream(), 4)), "OwnLoader: whether such"),
    }
    assert_refused(DataError, cases)
    with pytest.raises(RuntimeError, match="each of 2 processes reads whole"):
        on_two_ranks(lambda: read_of(DataLoader([*Stream(bad=())], 4).__iter__(), strategy="ddp", devices=2))


def test_a_validation_is_not_made_smaller_and_a_policy_must_be_known() -> None:
    with pytest.raises(DataError, match="the validation data raised at batch 3 of epoch 0"):
        left_out(loader(), loader(7))
    with pytest.raises(drivetrain.ConfigError, match=r"on_bad_batch.*'ignore'.*'raise'.*'skip'"):
        quiet(on_bad_batch="ignore")


def fitted_by_ranks(make: Any, windows: list[list[int]], **options: Any) -> tuple[Any, list[int]]:
    """The progress, and the bad batches after each step; the weights must be those of `windows`."""

    def on_ranks() -> Any:
        seen: list[int] = []
        note = LambdaCallback(on_step_end=lambda run: seen.append(run.progress.bad_batches))
        task, result = left_out(make(), strategy="ddp", devices=2, callbacks=[note], **options)
        result.progress.seconds = 0.0
        return {name: each.tolist() for name, each in task.state_dict().items()}, result.progress, seen

    ranks = on_two_ranks(on_ranks)
    assert ranks[0] == ranks[1]
    without = Regression(ADAMW)
    quiet(max_epochs=1).fit(without, windows_of(Lines(), *windows))
    for name, value in without.state_dict().items():
        torch.testing.assert_close(torch.tensor(ranks[0][0][name]), value, rtol=1e-5, atol=1e-6)
    return ranks[0][1:]


@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}])
def test_ranks_agree_and_weigh_what_is_there(options: dict[str, Any]) -> None:
    """Of rounds of four samples: rank 1 lacks its part of the first, both lack theirs of the third."""
    windows = [[0, 1], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19], [22, 23]]
    progress, seen = fitted_by_ranks(lambda: loader(3, 8, 10, 21), windows, **options)
    assert seen == [1, 1, 3, 3, 3, 4]
    assert (progress.steps, progress.samples, progress.skipped) == (5, 16, 1)


def test_bad_batches_of_split_data_are_left_out_and_no_placeholders() -> None:
    """Rank 0 lacks the third of its four batches, and rank 1 its only one."""

    def part() -> Any:
        own = [8, 9] if drivetrain.rank() else list(range(8))
        return already_split(DataLoader(Lines((5, 8), keep=own), batch_size=2))

    progress, seen = fitted_by_ranks(part, [[0, 1], [2, 3], [6, 7]])
    assert seen == [1, 1, 2, 2]
    assert (progress.steps, progress.samples, progress.skipped) == (3, 6, 1)
