"""What a file can do to a task's attributes, and what is not in it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.checkpoint.test_attributes import Handle, Task, count, keep, train
from torch import nn

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
        ["object", True, "subprocess:Popen", [], []],
        ["object", True, "tests.checkpoint.test_attributes:Handle", [], []],
        ["named", "builtins:type", []],
        ["enum", "os:environ", "PATH"],
        ["same", "nowhere", True],
    ):
        assert AttributeState(task).load({"new": node}, torch.device("cpu")) == ["new"]
    assert AttributeState(task).load({"_modules": 1, "gone.x": 1}, torch.device("cpu")) == [
        "_modules",
        "gone.x",
    ]
    with pytest.raises((AttributeError, CheckpointError)):
        AttributeState(task).load({"new": ["__class__"]}, torch.device("cpu"))
    assert isinstance(task.line, nn.Linear)
