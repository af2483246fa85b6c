"""A dataset that is changed while a run lasts: workers started at an epoch's begin see the change."""

import os
from pathlib import Path
from typing import Any

import torch
from tests.support.outcome import weights
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain import Callback, CheckpointConfig, LambdaCallback


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A dataset with settings, which notes in a file what it gave, and in which process."""

    batch_size = 2

    def __init__(self, note: Path | None = None) -> None:
        self.note = note
        self.noise = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.note is not None:
            with self.note.open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {self.noise}\n")
        features = torch.full((4,), index / 8) + self.noise
        return features, features.sum(0, keepdim=True)

    def noted(self, column: int) -> list[int]:
        assert self.note is not None
        return [int(line.split()[column]) for line in self.note.read_text(encoding="utf-8").splitlines()]


class Curriculum(Callback):
    """Makes a dataset harder with every epoch."""

    def __init__(self, data: Noisy) -> None:
        self.data = data

    def on_epoch_start(self, run: Any) -> None:
        self.data.noise = run.progress.epoch


def train(run_dir: Path, workers: int, stop: int | None = None) -> Any:
    data, task = Noisy(), Regression()

    def at(run: Any) -> None:
        if run.progress.updates == stop:
            run.stop("for now")

    quiet(
        max_epochs=3,
        num_workers=workers,
        run_dir=run_dir,
        callbacks=[Curriculum(data), LambdaCallback(on_step_end=at)],
        checkpoint=CheckpointConfig(every="1 step", by=None),
    ).fit(task, data, resume="auto")
    return weights(task)


def test_a_curriculum_is_seen_by_workers_and_resumed_exactly(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 0)
    assert train(tmp_path / "whole", 2) == straight
    train(tmp_path / "stopped", 2, stop=6)
    assert train(tmp_path / "stopped", 2) == straight


def test_what_is_changed_at_an_epochs_end_is_seen_in_the_next(tmp_path: Path) -> None:
    data = Noisy(tmp_path / "note")

    def harder(run: Any) -> None:
        data.noise += 10

    quiet(max_epochs=3, num_workers=2, callbacks=[LambdaCallback(on_epoch_end=harder)]).fit(
        Regression(), data, Noisy()
    )
    assert data.noted(1) == [0] * 8 + [10] * 8 + [20] * 8
