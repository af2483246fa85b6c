"""Linear layers in float8, emulated: which are, that they learn, and that the task is left as it was."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, Engine, FSDPConfig, OptimizerConfig, TaskModule
from drivetrain.checkpoint import load_weights
from drivetrain.core.errors import MissingDependencyError
from drivetrain.integrations.torchao.float8 import RECIPES, Float8
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision

pytest.importorskip("torchao")

EMULATED = Float8(emulate=True)


class Wide(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
            self.narrow = nn.Linear(32, 20)
            self.head = nn.Linear(20, 16)
        self.kinds: list[str] = []
        self.calls = 0
        self.net[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.kinds = [type(each).__name__ for each in (self.net[0], self.net[2], self.narrow, self.head)]
        made: Tensor = self.head(self.narrow(self.net(x)))
        return made

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs.float(), batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.2, momentum=0.9)


def data(batch_size: int = 8) -> DataLoader[Any]:
    x = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sin()), batch_size=batch_size)


def test_float8_layers_are_those_of_fitting_sizes_that_are_not_left_out() -> None:
    assert EMULATED.layers(Wide()) == {
        "net.0": "",
        "net.2": "",
        "narrow": "has sides of 32 and 20, which are not both multiples of 16",
        "head": "is left out",
    }
    # A last batch may have any number of rows, which the weight's gradient sums over.
    assert EMULATED.convert_module(Wide()).net[0].config.pad_inner_dim
    chosen = Float8(leave_out=("net.*",)).layers(Wide())
    assert chosen["net.0"] == chosen["net.2"] == "is left out"


@pytest.mark.parametrize(
    "recipe", ["tensorwise", *(pytest.param(each, marks=pytest.mark.nightly) for each in list(RECIPES)[1:])]
)
def test_float8_learns_as_bfloat16_and_leaves_an_ordinary_task(recipe: str, tmp_path: Path) -> None:
    losses = {}
    for precision in ("bf16-mixed", Float8(recipe=recipe, emulate=True)):
        task, directory = Wide(), tmp_path / str(precision)
        before, layers = task.state_dict(), list(task.modules())
        trainer = quiet(precision=precision, max_epochs=8, run_dir=directory, checkpoint=True)
        result = trainer.fit(task, data())
        losses[str(precision)] = result.metrics["train/loss"]
        stored = load_weights(str(result.model_path))
        assert sorted(stored) == sorted(before)
        assert {each.dtype for each in stored.values()} == {torch.float32}
        if precision != "bf16-mixed":
            assert task.kinds == ["Float8Linear", "Float8Linear", "Linear", "Linear"]
        assert all(mine is other for mine, other in zip(task.modules(), layers, strict=True))
        assert [type(each) for each in task.modules()] == [type(each) for each in Wide().modules()]
        assert sorted(vars(task.net[0])) == sorted(vars(Wide().net[0]))
        assert task.calls == 48, "a hook of the user's own is called"
    plain, eighth = losses.values()
    assert plain != eighth
    assert eighth < 0.4
    assert abs(eighth - plain) < 0.1 * plain


def test_float8_run_resumes_one_in_bfloat16(tmp_path: Path) -> None:
    quiet(precision="bf16-mixed", max_epochs=1, run_dir=tmp_path, checkpoint=True).fit(Wide(), data())
    trainer = quiet(precision=EMULATED, max_epochs=2, run_dir=tmp_path, checkpoint=True)
    assert trainer.fit(Wide(), data(), resume="auto").progress.steps == 12


def test_float8_layers_are_ordinary_only_when_the_last_of_their_engines_has_ended() -> None:
    alone, task, kinds = Wide(), Wide(), []
    trainer = quiet(precision=EMULATED, max_epochs=1)
    trainer.fit(alone, data())
    for number, _ in enumerate(trainer.steps(task, data())):
        kinds.append(type(task.net[0]).__name__)
        if number == 1:
            trainer.validate(task, data())
            copied = copy.deepcopy(task)
            trainer.validate(copied, data())
            assert type(copied.net[0]) is nn.Linear
    assert kinds == ["Float8Linear"] * 6
    torch.testing.assert_close(task.state_dict(), alone.state_dict(), rtol=0, atol=0)
    engines = [Engine("cpu", precision=EMULATED) for _ in range(2)]
    for each in engines:
        each.prepare(task.net[:])
    for each, kind in zip(reversed(engines), ("Float8Linear", "Linear"), strict=True):
        each.teardown()
        assert type(task.net[0]).__name__ == kind


def test_float8_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert as_precision("fp8").obstacle(cuda) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "need compute capability 8.9" in as_precision("fp8").obstacle(cuda)
    support = FSDP(FSDPConfig(tensor_parallel=2), world_size=2).supports(EMULATED)
    assert "tensor_parallel" in support.reason

    def fit(**options: Any) -> Any:
        return lambda: quiet(precision=Float8(emulate=True, **options), max_epochs=1).fit(Wide(), data())

    assert_refused(
        ConfigError,
        {
            "recipe": (fit(recipe="rowise"), "unknown recipe 'rowise'", "Did you mean 'rowwise'"),
            "name": (fit(leave_out="body.*"), "leave_out='body.*' names no linear layer"),
        },
    )
    monkeypatch.setattr("drivetrain.integrations.torchao.float8.is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match=r"'drivetrain\[torchao\]'"):
        quiet(precision="fp8")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_float8_trains_on_two_ranks_as_on_one() -> None:
    def compare() -> None:
        def trained(strategy: Any, devices: int) -> Wide:
            task = Wide()
            trainer = quiet(strategy=strategy, devices=devices, precision=EMULATED, max_epochs=2)
            trainer.fit(task, data(8 // devices))
            assert task.kinds == ["Float8Linear", "Float8Linear", "Linear", "Linear"], strategy
            assert type(task.net[0]) is nn.Linear
            return task

        alone = trained(SingleDevice("cpu"), 1).state_dict()
        for strategy in ("ddp", "fsdp", "accelerate"):
            # Each process has the scales of its own part of the batch.
            found = trained(strategy, 2).state_dict()
            torch.testing.assert_close(found, alone, rtol=0.02, atol=0.02)

    on_two_ranks(compare)
