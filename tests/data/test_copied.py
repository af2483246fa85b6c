"""A dataset that is changed while a run lasts: workers see at an epoch's start what no workers would see."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from drivetrain import Callback, CheckpointConfig, LambdaCallback
from drivetrain.data.copied import Copied


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A dataset with settings, which notes in a file what it gave, and in which process."""

    batch_size = 2

    def __init__(self, note: Path | None = None) -> None:
        self.note = note
        self.noise = 0
        self.table = np.zeros(5000)
        self.weight = torch.zeros(1)
        self.transform = SimpleNamespace(scale=1.0, names=["a", "b"])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.note is not None:
            with self.note.open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {self.noise}\n")
        features = torch.full((4,), index / 8) + self.noise + float(self.table[4000])
        return features, features.sum(0, keepdim=True)

    def noted(self, column: int) -> list[int]:
        assert self.note is not None
        return [int(line.split()[column]) for line in self.note.read_text(encoding="utf-8").splitlines()]


class Curriculum(Callback):
    """Makes a dataset harder with every epoch."""

    def __init__(self, data: Noisy, hidden: bool) -> None:
        self.data, self.hidden = data, hidden

    def on_epoch_start(self, run: Any) -> None:
        if self.hidden:
            self.data.table[:] = run.progress.epoch / 4  # which no look at it can tell
        else:
            self.data.noise = run.progress.epoch


def train(run_dir: Path, workers: int, hidden: bool, stop: int | None = None) -> Any:
    data, task = Noisy(), Regression()

    def at(run: Any) -> None:
        if run.progress.updates == stop:
            run.stop("for now")

    quiet(
        max_epochs=3,
        num_workers=workers,
        run_dir=run_dir,
        callbacks=[Curriculum(data, hidden), LambdaCallback(on_step_end=at)],
        checkpoint=CheckpointConfig(every="1 step", by=None),
    ).fit(task, data, resume="auto")
    return weights(task)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_curriculum_is_seen_by_workers_and_resumed_exactly(tmp_path: Path, hidden: bool) -> None:
    straight = train(tmp_path / "straight", 0, hidden)
    assert train(tmp_path / "whole", 2, hidden) == straight
    train(tmp_path / "stopped", 2, hidden, stop=6)
    assert train(tmp_path / "stopped", 2, hidden) == straight


def test_what_is_changed_at_an_epochs_end_is_seen_in_the_next(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "note")

    def harder(run: Any) -> None:
        data.noise += 10

    quiet(max_epochs=3, num_workers=2, callbacks=[LambdaCallback(on_epoch_end=harder)]).fit(
        Regression(), data, Noisy()
    )
    assert data.noted(1) == [0] * 8 + [10] * 8 + [20] * 8


def test_what_a_loops_body_changes_after_an_epochs_last_update_is_seen_in_the_next(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "note")
    for step in quiet(max_epochs=3, num_workers=2).steps(Regression(), data):
        if step.update % 4 == 3:
            data.noise += 10
    assert data.noted(1) == [0] * 8 + [10] * 8 + [20] * 8


class Changes(Regression):
    """Changes a dataset that it knows, which no callback shows: in its set-up, or after so many batches."""

    def __init__(self, data: Noisy, after: int) -> None:
        super().__init__()
        self.data, self.left = data, after
        self.change()

    def change(self) -> None:
        if self.left == 0:
            self.data.noise += 10
        self.left -= 1

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.change()
        return super().loss(outputs, batch)

    def configure_optimizers(self) -> Any:
        self.change()
        return super().configure_optimizers()


@pytest.mark.parametrize("bare", [False, True])
def test_what_a_task_changes_in_its_set_up_is_seen_at_once(tmp_path: Path, bare: bool) -> None:
    data = Noisy(tmp_path / "note")
    given = data if bare else DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    quiet(max_epochs=2, num_workers=2 * bare).fit(Changes(data, 1), given)
    assert data.noted(1)[-16:] == [10] * 16


def test_what_a_task_changes_in_an_epoch_is_told_of_and_seen_in_the_next(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "note")
    with pytest.warns(UserWarning, match=r"changed \(noise\) while epoch 0 .*num_workers=0"):
        quiet(max_epochs=3, num_workers=1).fit(Changes(data, 2), data)
    given = data.noted(1)
    assert given[:8] == [0] * 8
    assert given[-16:] == [10] * 16


def test_workers_that_the_user_keeps_are_kept_with_a_warning(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "note")
    given = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    with pytest.warns(UserWarning, match=r"changed \(noise\).*persistent_workers=False") as warned:
        quiet(max_epochs=3, callbacks=[Curriculum(data, hidden=False)]).fit(Regression(), given)
    assert len(warned) == 1
    assert data.noted(1) == [0] * 24


def test_a_callback_has_workers_start_anew_and_none_keeps_them(tmp_path: Path) -> None:
    def nothing(run: Any) -> None: ...

    for number, callbacks in enumerate(([], [LambdaCallback(on_step_end=nothing)])):
        data = Noisy(tmp_path / f"note-{number}")
        quiet(max_epochs=3, num_workers=1, callbacks=callbacks).fit(Regression(), data)
        assert len(set(data.noted(0))) == (3 if callbacks else 1)


def set_item(data: Noisy) -> None:
    data.transform.names[1] = "c"


def set_table(data: Noisy) -> None:
    data.table = np.zeros(5000)


def set_scale(data: Noisy) -> None:
    data.transform.scale = 2.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda data: setattr(data, "noise", 1), "dataset.noise"),
        (lambda data: setattr(data, "noise", False), "dataset.noise"),
        (lambda data: setattr(data, "more", None), "dataset.more"),
        (lambda data: delattr(data, "noise"), "dataset.noise"),
        (lambda data: data.weight.add_(1), "dataset.weight"),
        (set_table, "dataset.table"),
        (set_scale, "dataset.transform.scale"),
        (set_item, "dataset.transform.names[1]"),
    ],
)
def test_a_change_has_a_name(change: Callable[[Noisy], object], name: str) -> None:
    data = Noisy()
    copied = Copied(Subset(data, range(4)), len)
    copied.note()
    assert copied.changed() is None
    change(data)
    assert copied.changed() == name


def test_what_refers_to_itself_is_looked_at_once() -> None:
    data: Any = Noisy()
    data.itself, data.values = data, [float("nan"), np.float32(1)]
    copied = Copied(data)
    copied.note()
    assert copied.changed() is None
