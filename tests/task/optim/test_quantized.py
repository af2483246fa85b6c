"""Optimizers of torchao whose state takes 8 bits or fewer: they train, and resume bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import bits, outcome, weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import ConfigError, OptimizerConfig, TaskModule
from drivetrain.core.errors import CheckpointError
from drivetrain.task.optim.state import load_state_by_name, state_by_name
from drivetrain.testing import run_distributed

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
NAMES = ("adamw8bit", "adamw4bit", "adamwfp8", "adam8bit")
SIZE = 64


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchao compiles the step of each shape, for seconds; that it is a step does not depend on it."""
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)
    with torch.compiler.set_stance("force_eager"):
        yield


class Wide(TaskModule):  # a matrix of 4096 elements, which torchao quantizes, and one that is too small
    def __init__(self, name: str = "adamw8bit", **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))
        self.name, self.options = name, {"schedule": "cosine", "weight_decay": 0.01, **options}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return (outputs - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig(self.name, lr=0.01, **self.options)


def batches(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, SIZE, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_quantized_optimizer_resumes_bitwise_and_learns(name: str, tmp_path: Path) -> None:
    options = {"checkpoint": True, "loggers": ("csv", "jsonl")}
    quiet(max_steps=6, run_dir=tmp_path / "whole", **options).fit(Wide(name), batches())
    quiet(max_steps=3, run_dir=tmp_path / "again", **options).fit(Wide(name, total_steps=6), batches())
    quiet(max_steps=6, run_dir=tmp_path / "again", **options).fit(Wide(name), batches(), resume="auto")
    found, expected = outcome(tmp_path / "again"), outcome(tmp_path / "whole")
    for part in ("weights", "optimizer", "model.safetensors"):
        assert found[part] == expected[part]
    assert [each for each in found["optimizer"] if each.endswith("net.0.weight/exp_avg.codes")]
    task = Wide(name, schedule="constant")
    before, *_, last = [step.loss for step in quiet(max_epochs=10).steps(task, batches())]
    assert last < before / 2


def state_of(name: str) -> tuple[Any, Any, dict[str, Tensor], dict[str, Any], dict[Any, str]]:
    task = Wide(name)
    optimizer = task.configure_optimizers().factory(task.parameters(), lr=0.01)
    task.loss(task(batches()[0]), batches()[0]).backward()
    optimizer.step()
    names = {each: name for name, each in task.named_parameters()}
    tensors, meta = state_by_name(optimizer, names)
    return task, optimizer, tensors, json.loads(json.dumps(meta)), names


@pytest.mark.parametrize("name", NAMES)
def test_quantized_state_is_stored_by_its_parts_and_comes_back(name: str) -> None:
    task, optimizer, tensors, meta, names = state_of(name)
    assert {type(each) for each in tensors.values()} == {Tensor}
    stored = sum(each.nbytes for key, each in tensors.items() if key.startswith("net.0.weight/exp_avg"))
    assert stored < 2 * 4 * SIZE * SIZE / 3
    own, twin = bits(tensors), type(optimizer)(task.parameters(), lr=0.5)
    load_state_by_name(twin, names, {key: each.clone() for key, each in tensors.items()}, meta)
    assert bits(state_by_name(twin, names)[0]) == own
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if hasattr(value, "__tensor_flatten__"):
                assert twin.state[parameter][slot].__tensor_flatten__() == value.__tensor_flatten__()
    assert float(twin.param_groups[0]["lr"]) == pytest.approx(0.01)


def on_ranks(strategy: str, directory: Path) -> Any:
    task, options = Wide(), {"strategy": strategy, "devices": 2, "checkpoint": True, "run_dir": directory}
    with torch.compiler.set_stance("force_eager"):
        quiet(max_steps=2, **options).fit(task, batches())
    return weights(task)


def test_ddp_trains_with_a_quantized_optimizer_and_fsdp_refuses_it(tmp_path: Path) -> None:
    first, second = on_two_ranks(on_ranks, "ddp", tmp_path / "ddp")
    assert first == second
    assert list((tmp_path / "ddp").rglob("manifest.json"))
    with pytest.raises(RuntimeError, match="AdamW8bit on sharded parameters"):
        run_distributed(on_ranks, "fsdp", tmp_path / "fsdp")


def test_refusals_of_quantized_optimizers_and_their_state() -> None:
    task, optimizer, tensors, meta, names = state_of("adamw8bit")
    before, twin = bits(tensors), type(optimizer)(task.parameters(), lr=0.01, block_size=128)

    def fit(**options: Any) -> Any:
        return lambda: quiet(max_steps=1).fit(Wide(**options), [torch.ones(2, SIZE)])

    broken = {**meta, "quantized": ["net.0.bias/exp_avg.codes"]}
    cases: dict[str, tuple[Any, ...]] = {
        "amsgrad": (fit(amsgrad=True), "AdamW8bit", "amsgrad=True", "'adamw'"),
        "no block": (fit(block_size=0), "block_size", "not 0"),
        "no divisor": (fit(block_size=333), "block_size=333", "no state would be quantized"),
        "another size": (lambda: load_state_by_name(twin, names, tensors, meta), "same block_size"),
        "no part": (lambda: load_state_by_name(optimizer, names, tensors, broken), "lacks the parts"),
    }
    assert_refused((ConfigError, CheckpointError), cases)
    assert not twin.state
    assert bits(state_by_name(optimizer, names)[0]) == before
