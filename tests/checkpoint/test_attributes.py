"""The order in which a resume restores attributes, and those of checkpoints of earlier versions."""

from pathlib import Path
from typing import Any

import torch
from tests.callbacks.test_attributes import Recurrent
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import LambdaCallback
from drivetrain.checkpoint import DirectoryCheckpointIO, pack, unpack


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


def test_own_extra_states_come_after_attributes_and_older_generators_come_back(
    tmp_path: Path,
) -> None:
    def train(name: str) -> Any:
        trainer = quiet(max_steps=3, checkpoint=True, run_dir=tmp_path / f"from-{name}")
        trainer.fit(task := Noisy(), pairs(), resume=str(tmp_path / name))
        return task

    quiet(max_steps=3, checkpoint=True, run_dir=tmp_path / "run").fit(first := Noisy(), pairs())
    storage = DirectoryCheckpointIO()
    saved = storage.load(str(tmp_path / "run" / "checkpoints" / "step-00000003"))
    storage.save(str(tmp_path / "old"), saved)
    task = train("old")
    assert (first.count, task.count) == (3, 100)
    state = {**unpack(saved.objects["state"], saved.tensors["state"]), "attributes": []}
    state["generators"] = {"noise": first.noise.get_state()}
    saved.objects["state"], saved.tensors["state"] = pack(state)
    storage.save(str(tmp_path / "older"), saved)
    for each in (task, train("older")):
        assert torch.equal(each.noise.get_state(), first.noise.get_state())


def test_validations_leave_generators_as_they_were(tmp_path: Path) -> None:
    found = []
    for where, last in (("whole", None), ("parts", 1), ("parts", None)):
        stop = LambdaCallback(on_step_end=lambda run, last=last: run.stop("") if last else None)
        task = Recurrent()
        options = {"max_epochs": 2, "checkpoint": True, "run_dir": tmp_path / where, "callbacks": [stop]}
        quiet(**options).fit(task, pairs(8), pairs(4), resume="auto")
        found.append(task.noise.get_state().tolist())
    assert found[0] == found[2] != found[1]
