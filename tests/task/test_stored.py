"""A task in a checkpoint (`from_checkpoint`): rebuilt from its arguments and weights, or refused."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.refusals import assert_refused
from tests.support.tasks import pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointError, ConfigError, Engine, OptimizerConfig, TaskModule
from drivetrain.task.stored import StoredTask


class Layered(TaskModule):  # takes every kind of constructor argument
    def __init__(
        self, sizes: Any = (4, 3), *more: int, activation: Any = None, options: Any = None, **rest: Any
    ):
        super().__init__()
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.net = nn.Sequential(*layers, *(nn.Linear(sizes[-1], sizes[-1]) for _ in more))
        self.activation = activation

    def forward(self, features: Tensor) -> Tensor:
        outputs = self.net(features)
        return self.activation(outputs) if self.activation else outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs.sum(1, keepdim=True), batch[1])


class Strict(Layered):  # takes nothing but what it names, and has a default that no file can hold
    def __init__(self, activation: Any = torch.relu) -> None:
        super().__init__(activation=activation)


class Calibrated(Layered):  # has a state that is no tensor
    seen: Any = None

    def __init__(self) -> None:
        super().__init__()

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@dataclass
class Config:
    hidden: int = 3
    activation: Any = None


class Configured(Layered):  # takes a dataclass, as many projects do
    def __init__(self, config: Config, *, other: Config | None = None) -> None:
        super().__init__(sizes=(4, config.hidden))
        self.config = config


class Optimized(Layered):  # takes the configuration of its optimizer
    def __init__(self, optimizer: OptimizerConfig) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> OptimizerConfig:
        return self.optimizer


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    def train(task: TaskModule, **options: Any) -> Path:
        run_dir = tmp_path / str(len(list(tmp_path.iterdir())))
        quiet(max_steps=2, run_dir=run_dir, checkpoint=True, **options).fit(task, pairs())
        return run_dir

    return train


TASKS = {
    "defaults": lambda: Layered(),
    "nested": lambda: Layered([4, 5, 2], options={"rate": 0.1, "n": ("a", "b"), 3: None}, extra=float("inf")),
    "positional": lambda: Layered((4, 2), 1, 1, options="x"),
    "dataclass": lambda: Configured(Config(5), other=Config(6)),
    "optimizer": lambda: Optimized(OptimizerConfig("adamw", lr=0.1, betas=(0.8, 0.9))),
}


@pytest.mark.parametrize("kind", TASKS)
def test_from_checkpoint_gives_a_task_with_its_arguments_and_weights(kind: str, trained: Any) -> None:
    task = TASKS[kind]()
    again = type(task).from_checkpoint(str(trained(task)))
    assert type(again) is type(task)
    assert again.hparams == task.hparams
    assert weights(again) == weights(task)
    assert not again.training


def test_from_checkpoint_keeps_the_dtype_and_a_state_that_is_no_tensor(trained: Any) -> None:
    task = Layered()
    again = Layered.from_checkpoint(trained(task, precision="bf16-true"))
    assert {value.dtype for value in again.state_dict().values()} == {torch.bfloat16}
    assert weights(again) == weights(task)
    calibrated = Calibrated()
    calibrated.seen = {"steps": 3, "range": torch.tensor([0.5, 2.0])}
    again = Calibrated.from_checkpoint(trained(calibrated))
    assert again.seen["steps"] == 3
    assert torch.equal(again.seen["range"], calibrated.seen["range"])


def test_from_checkpoint_takes_given_arguments_before_recorded_ones(trained: Any) -> None:
    task = Layered(activation=torch.tanh, options=torch.ones(2))
    run_dir, strict = trained(task), trained(Strict())
    again = Layered.from_checkpoint(run_dir, activation=torch.tanh, options="new")
    assert (again.activation, again.hparams["options"]) == (torch.tanh, "new")
    assert weights(again) == weights(task)
    # A default that no file can hold is taken again.
    assert Strict.from_checkpoint(strict).activation is torch.relu
    configured = trained(Configured(Config(5), other=Config(6)))
    assert Configured.from_checkpoint(configured, other=None).hparams["other"] is None
    held = trained(Configured(Config(3, activation=torch.tanh)))
    assert Configured.from_checkpoint(held, config=Config(3)).config == Config(3)


def test_refusals_of_from_checkpoint(tmp_path: Path, trained: Any) -> None:
    layered, wider = trained(Layered(options="old")), trained(Layered(sizes=(4, 2)))
    held, strict = trained(Layered(activation=torch.tanh, options=torch.ones(2))), trained(Strict(torch.tanh))
    filled = trained(Configured(Config(3, activation=torch.tanh)))
    with Engine("cpu") as engine:
        engine.save(str(tmp_path / "own"), model=engine.prepare(Layered()))

    def load(kind: Any, path: Any, **arguments: Any) -> Any:
        return lambda: kind.from_checkpoint(path, **arguments)

    def arguments(stored: dict[str, Any]) -> Any:
        task = StoredTask("there", {}, (), {}, {"config": {"class": "Config", "values": {}, **stored}})
        assert task.arguments(Configured, {"config": Config(5)}) == {"config": Config(5)}
        return lambda: task.arguments(Configured, {})

    asked = "a file cannot hold (config)"
    cases: dict[str, tuple[Any, ...]] = {
        "no path": (load(Layered, None), "a path, not None", "last_checkpoint"),
        "nowhere": (load(Layered, tmp_path / "nowhere"), "nowhere"),
        "own loop": (load(Layered, tmp_path / "own"), "no constructor arguments"),
        "functions": (load(Layered, held), "(activation, options)", "activation=..."),
        "another shape": (load(Layered, layered, sizes=(4, 7)), "'net.0.weight'", "(3, 4)", "(7, 4)"),
        "another task": (load(Calibrated, wider), "Calibrated", "'sizes'"),
        "no default": (load(Strict, strict), "a file cannot hold (activation)"),
        "a function in a dataclass": (load(Configured, filled), asked, "config=..."),
        "a field more": (arguments({"values": {"hidden": 5, "depth": 2}}), "fit Config", "'depth'"),
        "a function of Python": (arguments({"class": "builtins.print"}), asked),
    }
    assert_refused((ConfigError, CheckpointError), cases)
