"""Workers are started once, early, and are asked for no less and no more than is used."""

import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.indexed import Augmented, batches, source
from tests.support.outcome import weights
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain import CheckpointConfig, DataError, LambdaCallback
from drivetrain.data import Feed, Transfer, already_split, as_source


class Noted(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that notes in a file which process fetched what, and what was asked of it before."""

    def __init__(self, note: Path, size: int = 12, batch_size: int = 2) -> None:
        self.note, self.size, self.batch_size = note, size, batch_size
        self.epoch = -1
        note.touch()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with self.note.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {index} {self.epoch}\n")
        features = torch.full((4,), index / self.size) + torch.rand(4) + self.epoch
        return features, features.sum(0, keepdim=True)

    def fetched(self, column: int = 1) -> list[int]:
        return [int(line.split()[column]) for line in self.note.read_text(encoding="utf-8").splitlines()]


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_workers_are_started_once_for_all_epochs_and_validations(tmp_path: Path) -> None:
    train, validation = Noted(tmp_path / "train"), Noted(tmp_path / "validation", 4)
    quiet(max_epochs=3, num_workers=2).fit(Regression(), train, validation)
    assert len(set(train.fetched(0))) == 2
    assert len(set(validation.fetched(0))) == 2
    assert os.getpid() not in {*train.fetched(0), *validation.fetched(0)}
    assert Counter(train.fetched()) == dict.fromkeys(range(12), 3)
    assert Counter(validation.fetched()) == dict.fromkeys(range(4), 3)


def test_nothing_is_fetched_that_no_epoch_uses(tmp_path: Path) -> None:
    several: list[dict[str, Any]] = [
        {"max_epochs": 3, "limit_train_batches": 4},
        {"max_steps": 12},
        {"max_steps": 18, "max_epochs": 2},
        {"max_epochs": 2, "gradient_accumulation_steps": 4},
    ]
    for number, options in enumerate(several):
        train = Noted(tmp_path / f"train-{number}")
        quiet(num_workers=1, **options).fit(Regression(), train)
        assert len(train.fetched()) == 24, options


@pytest.mark.parametrize("divided", [False, True])
def test_the_next_epochs_batches_are_made_before_the_last_one_is_used(tmp_path: Path, divided: bool) -> None:
    data = Noted(tmp_path / "train", 6)
    read = as_source(already_split(data) if divided else data, "training", 0, num_workers=1, shuffle=True)
    feed = Feed(read, Transfer(torch.device("cpu")))
    assert len(list(itertools.islice(feed.windows(0, until=2), 3))) == 3
    assert eventually(lambda: len(data.fetched()) >= 10)  # two batches for the worker
    assert len(list(feed.windows(1, until=2))) == 3
    feed.close()
    assert len(data.fetched()) == 12
    expected = as_source(data, "training", 0, shuffle=True)
    before = data.fetched()
    for epoch in range(2):
        assert len(list(expected.batches(epoch, 0))) == 3
    assert data.fetched()[12:] == before


class Setting(Regression):  # sees, while it is set up, what the workers have done
    def __init__(self, looks: Callable[[], None]) -> None:
        super().__init__()
        self.looks = looks

    def configure_optimizers(self) -> Any:
        self.looks()
        return super().configure_optimizers()


def test_the_first_batches_are_made_while_the_run_is_set_up(tmp_path: Path) -> None:
    train = Noted(tmp_path / "train")
    seen: list[bool] = []
    task = Setting(lambda: seen.append(eventually(lambda: len(train.fetched()) >= 8)))
    quiet(max_epochs=2, num_workers=2).fit(task, train)
    assert seen == [True]
    assert Counter(train.fetched()) == dict.fromkeys(range(12), 2)


def test_a_set_up_that_fails_ends_them(tmp_path: Path) -> None:
    def fails() -> None:
        assert len(multiprocessing.active_children()) == 2
        raise RuntimeError("no optimizer")

    with pytest.raises(RuntimeError, match="no optimizer") as caught:
        quiet(max_epochs=2, num_workers=2).fit(Setting(fails), Noted(tmp_path / "train"))
    assert caught.tb is not None  # and holds on to everything
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_ends_them(tmp_path: Path, fails: bool) -> None:
    def stop(run: Any) -> None:
        if run.progress.steps == 2:
            assert multiprocessing.active_children()
            run.stop("enough")
            if fails:
                raise RuntimeError("enough")

    trainer = quiet(max_epochs=9, num_workers=2, callbacks=[LambdaCallback(on_step_end=stop)])
    try:
        trainer.fit(Regression(), Noted(tmp_path / "train"), Noted(tmp_path / "validation"))
    except RuntimeError:
        assert fails
        assert not multiprocessing.active_children()
    assert not multiprocessing.active_children()


def trained(run_dir: Path, workers: int, stop: int | None = None, **changes: Any) -> Any:
    """The weights after three epochs, or until a stop; a hook of `changes` gives the dataset a number."""
    data, task = Noted(run_dir.parent / "note"), Regression()

    def at(run: Any) -> None:
        if run.progress.steps == stop:
            run.stop("for now")

    hooks = {name: lambda run: setattr(data, "epoch", run.progress.epoch) for name in changes}
    options: dict[str, Any] = {"max_epochs": 3, "num_workers": workers, "run_dir": run_dir}
    trainer = quiet(
        **options,
        callbacks=[LambdaCallback(on_step_end=at, **hooks)],
        checkpoint=CheckpointConfig(every="1 step", by=None),
    )
    trainer.fit(task, data, Noted(run_dir.parent / "validation", 4), resume="auto")
    return weights(task)


@pytest.mark.parametrize("stopped_at", [4, 6])
def test_a_run_is_resumed_as_if_no_worker_had_been_ahead(tmp_path: Path, stopped_at: int) -> None:
    straight = trained(tmp_path / "straight", 0)
    trained(tmp_path / "stopped", 1, stopped_at)
    (tmp_path / "note").write_text("", encoding="utf-8")
    assert trained(tmp_path / "stopped", 1) == straight
    assert len(Noted(tmp_path / "note").fetched()) == 36 - 2 * stopped_at


@pytest.mark.heavy("three fits, two with workers")
@pytest.mark.parametrize("hook", ["on_epoch_start", "on_epoch_end"])
def test_a_dataset_that_a_callback_changes_is_so_in_workers_and_a_resume(hook: str, tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", 0, **{hook: True})
    assert trained(tmp_path / "whole", 2, **{hook: True}) == straight != trained(tmp_path / "unchanged", 0)
    if hook == "on_epoch_start":
        trained(tmp_path / "stopped", 2, 7, **{hook: True})
        assert trained(tmp_path / "stopped", 2, **{hook: True}) == straight


def test_a_worker_that_fails_is_ended_and_replaced_by_the_next_reading() -> None:
    expected = batches(source(), 1)
    fails = Augmented(fails=(int(expected[-1][-1][0]), ValueError("no such sample")))
    read = source(fails, workers=1, persistent_workers=True)
    with pytest.raises(DataError, match="no such sample"):
        batches(read, 1)
    assert not multiprocessing.active_children()
    assert next(iter(read.batches(1, 0)))[0].tolist() == expected[0]
    read.close()


@pytest.mark.landing  # a new interpreter
def test_workers_may_be_spawned() -> None:
    read = source(workers=1, multiprocessing_context="spawn", persistent_workers=True)
    assert batches(read, 1) == batches(source(), 1)
    assert [type(each).__name__ for each in multiprocessing.active_children()] == ["SpawnProcess"]
    read.close()
