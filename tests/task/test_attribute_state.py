"""What a file can do to a task's attributes, and what is not in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.test_attributes import Handle, Note, Task, count, keep, train
from tests.support.messages import warned
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import CheckpointError
from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.task.attribute_state import AttributeState


def test_only_what_has_changed_is_stored_so_that_a_new_setting_of_the_program_counts(tmp_path: Path) -> None:
    def make(rate: float) -> Callable[[], Task]:
        return lambda: Task(keep(rate=rate, count=0, best=0.0, history=[]), count)

    train(tmp_path, make(0.1), 2)
    _, task = train(tmp_path, make(0.2), 4)
    assert (task.rate, task.count) == (0.2, 4)
    stored = DirectoryCheckpointIO().load(str(tmp_path / "checkpoints" / "step-00000004"))
    assert not {"rate", "count"} & {name.rpartition(".")[2] for name in stored.tensors["model"]}
    fresh = make(0.3)()
    fresh.load_weights(tmp_path / "checkpoints" / "step-00000004")
    assert fresh.count == 0


def test_a_file_makes_no_objects_but_data_and_sets_nothing_of_torchs() -> None:
    task = Task(keep(kept={"inner": Handle()}), count)
    for node in (
        ["state", "tests.checkpoint.test_attributes.Handle", {}],
        ["deque", False, [], [1]],
        ["generator", {}],
        ["same", "nowhere"],
    ):
        assert AttributeState(task).load({"new": node}, torch.device("cpu")) == ["new"]
    names = ["_modules", "gone.x"]
    assert AttributeState(task).load(dict.fromkeys(names, 1), torch.device("cpu")) == names
    for node in (["__class__"], ["type", False, [], []]):
        with pytest.raises((AttributeError, CheckpointError)):
            AttributeState(task).load({"new": node}, torch.device("cpu"))
    assert isinstance(task.line, nn.Linear)


class Failing:  # answers each question by an error, as clients of other libraries do
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


STAGES = [Note("warm", 1), Note("train", 2)]


def odd(task: Any) -> float:
    task.count += 1
    task.act = torch.tanh  # which was None
    task.stage = STAGES[1]
    task.read = np.frombuffer(bytes([task.count] * 4), np.uint8)
    return float(task.count)


def test_odd_attributes_neither_end_a_fit_nor_reach_what_others_hold(tmp_path: Path) -> None:
    def make() -> Task:
        own = {"client": Failing(), "act": None, "stage": STAGES[0], "read": None}
        return Task(lambda task: vars(task).update(own, count=0), odd)

    with warned(r"'stage' \(tests.*Note\), 'act' \(builtin_function.*|.*back 'act', 'stage' of Task"):
        train(tmp_path, make, 2)
        _, task = train(tmp_path, make, 4)
    assert (task.count, task.stage.value, task.act) == (4, 2, torch.tanh)
    assert task.read.tolist() == [4] * 4
    assert [(each.name, each.value) for each in STAGES] == [("warm", 1), ("train", 2)]


class Noisy(Regression):  # has an extra state, which sets an attribute
    def __init__(self) -> None:
        super().__init__()
        self.count, self.noise = 0, torch.Generator()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.count += 1
        return super().loss(outputs, batch) * torch.rand(1, generator=self.noise).sum()

    def get_extra_state(self) -> int:
        return 100

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_own_extra_states_come_after_attributes(tmp_path: Path) -> None:
    trainer = quiet(max_steps=3, checkpoint=True, run_dir=tmp_path)
    trainer.fit(first := Noisy(), pairs())
    trainer.fit(task := Noisy(), pairs(), resume="auto")
    assert (first.count, task.count) == (3, 100)
    assert torch.equal(task.noise.get_state(), first.noise.get_state())
