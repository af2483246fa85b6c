"""A task in a checkpoint: rebuilt from its arguments and weights, or refused with what is lacking."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointError, ConfigError, Engine, TaskModule
from drivetrain.stored_task import pack_hparams, read_task


class Layered(TaskModule):
    """Takes every kind of constructor argument."""

    def __init__(
        self,
        sizes: Any = (4, 3),
        *more: int,
        activation: Any = None,
        options: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.net = nn.Sequential(*layers, *(nn.Linear(sizes[-1], sizes[-1]) for _ in more))
        self.activation = activation

    def forward(self, features: Tensor) -> Tensor:
        outputs = self.net(features)
        return self.activation(outputs) if self.activation else outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs.sum(1, keepdim=True), batch[1])


class Strict(Layered):
    """Takes nothing but what it names, and has a default that no file can hold."""

    def __init__(self, activation: Any = torch.relu) -> None:
        super().__init__(activation=activation)


class Calibrated(Layered):
    """Has a submodule with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()


class Meter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def trained(task: TaskModule, run_dir: Path) -> Path:
    quiet(max_steps=2, run_dir=run_dir, checkpoint=True).fit(task, pairs())
    return run_dir


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sizes": [4, 5, 2]},
        {"options": {"rate": 0.1, "names": ("a", "b"), 3: None}, "extra": float("inf")},
    ],
    ids=["defaults", "list", "nested"],
)
def test_a_task_comes_back_with_its_arguments_and_weights(arguments: dict[str, Any], tmp_path: Path) -> None:
    task = Layered(**arguments)
    again = Layered.from_checkpoint(str(trained(task, tmp_path / "run")))
    assert type(again) is Layered
    assert again.hparams == task.hparams
    assert weights(again) == weights(task)
    assert again.training


def test_positional_arguments_come_back_in_their_places(tmp_path: Path) -> None:
    task = Layered((4, 2), 1, 1, options="x")
    again = Layered.from_checkpoint(str(trained(task, tmp_path / "run")))
    assert len(again.net) == 3
    assert again.hparams == task.hparams
    assert weights(again) == weights(task)


def test_an_argument_that_no_file_can_hold_is_asked_for(tmp_path: Path) -> None:
    task = Layered(activation=torch.tanh, options=torch.ones(2))
    run_dir = str(trained(task, tmp_path / "run"))
    with pytest.raises(
        ConfigError, match=r"\(activation, options\).*from_checkpoint\(path, activation=...\)"
    ):
        Layered.from_checkpoint(run_dir)
    again = Layered.from_checkpoint(run_dir, activation=torch.tanh, options=None)
    assert again.activation is torch.tanh
    assert weights(again) == weights(task)


def test_given_arguments_go_before_recorded_ones(tmp_path: Path) -> None:
    run_dir = str(trained(Layered(options="old"), tmp_path / "run"))
    assert Layered.from_checkpoint(run_dir, options="new").hparams["options"] == "new"
    with pytest.raises(CheckpointError, match=r"'net.0.weight' has shape \(3, 4\) there, \(7, 4\) here"):
        Layered.from_checkpoint(run_dir, sizes=(4, 7))


def test_a_misspelt_argument_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    run_dir = str(trained(Strict(), tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"Strict has no option 'activatoin'. Did you mean 'activation'\?"):
        Strict.from_checkpoint(run_dir, activatoin=torch.tanh)


def test_a_default_that_no_file_can_hold_is_taken_again(tmp_path: Path) -> None:
    again = Strict.from_checkpoint(trained(Strict(), tmp_path / "default"))
    assert again.activation is torch.relu
    with pytest.raises(ConfigError, match=r"arguments that a file cannot hold \(activation\)"):
        Strict.from_checkpoint(trained(Strict(torch.tanh), tmp_path / "other"))


def test_arguments_that_the_task_does_not_take_are_named(tmp_path: Path) -> None:
    run_dir = str(trained(Layered(sizes=(4, 2)), tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"Calibrated.*'sizes'"):
        Calibrated.from_checkpoint(run_dir)


def test_a_state_that_is_no_tensor_comes_back_too(tmp_path: Path) -> None:
    task = Calibrated()
    task.meter.seen = {"steps": 3, "range": torch.tensor([0.5, 2.0])}
    again = Calibrated.from_checkpoint(str(trained(task, tmp_path / "run")))
    assert again.meter.seen["steps"] == 3
    assert torch.equal(again.meter.seen["range"], task.meter.seen["range"])


def test_a_task_comes_back_in_the_dtype_that_it_was_saved_in(tmp_path: Path) -> None:
    task = Layered()
    quiet(max_steps=1, run_dir=tmp_path / "run", checkpoint=True, precision="bf16-true").fit(task, pairs())
    again = Layered.from_checkpoint(str(tmp_path / "run"))
    for name, value in task.state_dict().items():
        assert value.dtype == again.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(again.state_dict()[name], value)


def test_a_checkpoint_of_a_loop_of_ones_own_has_no_arguments(tmp_path: Path) -> None:
    engine = Engine("cpu")
    engine.save(str(tmp_path / "own"), model=engine.prepare(Layered()))
    with pytest.raises(
        CheckpointError, match="holds no constructor arguments; it was not saved by a Trainer"
    ):
        Layered.from_checkpoint(str(tmp_path / "own"))


def test_no_checkpoint_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Layered.from_checkpoint(str(tmp_path / "nowhere"))


def test_what_a_file_cannot_hold_is_named_and_the_rest_is_stored(tmp_path: Path) -> None:
    task = Layered(activation=nn.ReLU(), options={"nested": [torch.zeros(1)]}, name="x")
    assert pack_hparams(task) == {
        "values": {"sizes": {"$tuple": [4, 3]}, "more": {"$tuple": []}, "name": "x"},
        "unstored": ["activation", "options"],
    }
    assert pack_hparams(nn.Linear(1, 1)) == {"values": {}, "unstored": []}
    stored = read_task(str(trained(task, tmp_path / "run")))
    assert stored.hparams == {"sizes": (4, 3), "more": (), "name": "x"}
    assert stored.unstored == ("activation", "options")
