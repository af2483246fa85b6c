"""Data that the model makes is read when the step before it is done, from data of every kind."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import LambdaCallback, already_split


class Made(Dataset[Any]):  # from the weights of a task
    def __init__(self, task: Regression) -> None:
        self.task = task

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.task.line.weight.detach()[0].clone(), torch.ones(1)


class MadeStream(IterableDataset[Any]):
    def __init__(self, task: Regression) -> None:
        self.made = Made(task)

    def __iter__(self) -> Iterator[Any]:
        return (tuple(each[None] for each in self.made[index]) for index in range(5))


OF_MODEL: dict[str, Any] = {
    "dataset": Made,
    "loader": lambda task: DataLoader(Made(task), 1),
    "stream": MadeStream,
    "stream in a loader": lambda task: DataLoader(MadeStream(task), None),
    "generator": lambda task: iter(MadeStream(task)),
    "split": lambda task: already_split(MadeStream(task)),
}


@pytest.mark.parametrize("kind", OF_MODEL)
def test_data_that_the_model_makes_is_read_when_the_step_before_is_done(kind: str) -> None:
    task, made, seen = Regression(), list[Any](), list[Any]()
    read = LambdaCallback(on_step_start=lambda run: seen.append(run.window.micro_batches[0].batch[0]))
    size = {"batch_size": 1} if kind == "dataset" else {}
    made.append(task.line.weight.tolist())
    for _ in quiet(max_steps=5, callbacks=[read], **size).steps(task, OF_MODEL[kind](task)):
        with torch.no_grad():
            task.line.weight.mul_(1.5)  # what the body of the loop does is seen too
        made.append(task.line.weight.tolist())
    assert [each.tolist() for each in seen] == made[:5]
