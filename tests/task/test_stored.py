"""A task in a checkpoint: rebuilt from its arguments and weights, or refused with what is lacking."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointError, ConfigError, Engine, OptimizerConfig, TaskModule
from drivetrain.checkpoint import load_weights
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.task.stored import StoredTask, pack_hparams, read_task


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


def test_no_path_is_answered_with_the_checkpoint_that_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"takes a path, not None.*best_checkpoint is None where.*last_checkpoint"
    ):
        Layered.from_checkpoint(None)  # type: ignore[arg-type]


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


@dataclass
class Config:
    hidden: int = 3
    activation: Any = None


class Configured(Layered):
    """Takes a dataclass, as many projects do."""

    def __init__(self, config: Config, *, other: Config | None = None) -> None:
        super().__init__(sizes=(4, config.hidden))
        self.config = config


def test_a_dataclass_comes_back_where_the_constructor_names_it(tmp_path: Path) -> None:
    task = Configured(Config(5), other=Config(6))
    run_dir = trained(task, tmp_path / "run")
    again = Configured.from_checkpoint(run_dir)
    assert again.config == Config(5)
    assert again.hparams == task.hparams
    assert weights(again) == weights(task)
    assert Configured.from_checkpoint(run_dir, other=None).hparams["other"] is None
    with pytest.raises(CheckpointError, match=r"'net.0.weight' has shape \(5, 4\) there, \(7, 4\) here"):
        Configured.from_checkpoint(run_dir, config=Config(7))


class Optimized(Layered):
    """Takes the configuration of its optimizer."""

    def __init__(self, optimizer: OptimizerConfig) -> None:
        super().__init__()
        self.optimizer = optimizer


def test_the_configuration_of_an_optimizer_comes_back_with_the_optimizers_own_options(tmp_path: Path) -> None:
    config = OptimizerConfig("adamw", lr=0.1, betas=(0.8, 0.9))
    quiet(max_steps=1, checkpoint=True, run_dir=tmp_path).fit(Optimized(config), pairs())
    assert Optimized.from_checkpoint(tmp_path).optimizer == config


def test_a_dataclass_that_no_file_can_hold_is_asked_for(tmp_path: Path) -> None:
    run_dir = trained(Configured(Config(3, activation=torch.tanh)), tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"a file cannot hold \(config\).*from_checkpoint\(path, config=...\)"
    ):
        Configured.from_checkpoint(run_dir)
    assert Configured.from_checkpoint(run_dir, config=Config(3)).config == Config(3)


class Unannotated(Layered):
    """As `Configured` would be written without annotations."""

    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]
        super().__init__(sizes=(4, config.hidden))


def test_a_dataclass_of_which_the_constructor_does_not_tell_the_kind_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a file cannot hold \(config\)"):
        Unannotated.from_checkpoint(trained(Unannotated(Config()), tmp_path / "never stored"))
    with pytest.raises(ConfigError, match=r"a file cannot hold \(config\)"):
        Unannotated.from_checkpoint(trained(Configured(Config()), tmp_path / "stored"))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"class": "Config", "values": {"hidden": 5, "depth": 2}}, r"does not fit Config: .*'depth'"),
        ({"class": "Path", "values": {}}, r"a file cannot hold \(config\)"),
        ({"class": "builtins.print", "values": {}}, r"a file cannot hold \(config\)"),
        ({"class": "Config", "values": {}, "dataclasses": {}}, r"a file cannot hold \(config\)"),
    ],
)
def test_a_stored_dataclass_that_the_constructor_does_not_take_is_asked_for(
    stored: dict[str, Any], message: str
) -> None:
    task = StoredTask("there", {}, (), {}, {"config": stored})
    with pytest.raises(ConfigError, match=message):
        task.arguments(Configured, {})
    assert task.arguments(Configured, {"config": Config(5)}) == {"config": Config(5)}


def test_a_list_that_the_constructor_changes_is_recorded_as_it_was_given() -> None:
    class Growing(Layered):
        def __init__(self, sizes: list[int]) -> None:
            sizes.append(2)
            super().__init__(sizes=sizes)

    given = [4, 3]
    assert Growing(given).hparams == {"sizes": [4, 3]}
    assert given == [4, 3, 2]


class Compiled(Layered):
    """Has a submodule that may be compiled."""

    def __init__(self, wrap: bool = False) -> None:
        super().__init__()
        if wrap:
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


@pytest.mark.parametrize("wrap", [True, False])
def test_a_task_comes_back_compiled_or_not(wrap: bool, tmp_path: Path) -> None:
    task = Compiled(wrap)
    run_dir = trained(task, tmp_path / "run")
    for again in (Compiled.from_checkpoint(run_dir), Compiled.from_checkpoint(run_dir, wrap=not wrap)):
        assert list(weights(again).values()) == list(weights(task).values())
    assert load_weights(run_dir / "model.safetensors").keys() == module_state(Compiled(not wrap))[0].keys()


def test_a_file_of_weights_alone_says_what_can_be_done_with_it(tmp_path: Path) -> None:
    run_dir = trained(Layered(), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is a file of weights, .* its load_weights\(path\)"):
        Layered.from_checkpoint(run_dir / "model.safetensors")
    inside = next(run_dir.glob("checkpoints/*/model.safetensors"))
    with pytest.raises(CheckpointError, match=r"Did you mean the checkpoint that it is in"):
        Layered.from_checkpoint(inside)


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
