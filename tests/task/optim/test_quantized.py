"""Optimizers of torchao whose state takes 8 bits or fewer: they train, and resume bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import bits, outcome, weights
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import ConfigError, MemoryConfig, MemoryReport, OptimizerConfig, TaskModule
from drivetrain.core.errors import CheckpointError, MissingDependencyError
from drivetrain.task.optim.config import OPTIMIZERS
from drivetrain.task.optim.quantized import QUANTIZED
from drivetrain.task.optim.state import load_state_by_name, state_by_name
from drivetrain.testing.distributed import run_distributed

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

NAMES = ("adamw8bit", "adamw4bit", "adamwfp8", "adam8bit")
SIZE = 64


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchao compiles the update of each shape, for seconds; that it is an update does not depend on it."""
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)
    with torch.compiler.set_stance("force_eager"):
        yield


class Wide(TaskModule):
    """A matrix of 4096 elements, which torchao quantizes, and one that is too small."""

    def __init__(self, name: str = "adamw8bit", **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))
        self.name, self.options = name, options

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return (outputs - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        options = {"schedule": "cosine", "weight_decay": 0.01, **self.options}
        return OptimizerConfig(self.name, lr=0.01, **options)


def batches(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, SIZE, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(name: str, tmp_path: Path) -> None:
    options = {"checkpoint": True, "loggers": ("csv", "jsonl")}
    quiet(max_steps=6, run_dir=tmp_path / "whole", **options).fit(Wide(name), batches())
    quiet(max_steps=3, run_dir=tmp_path / "again", **options).fit(Wide(name, total_steps=6), batches())
    quiet(max_steps=6, run_dir=tmp_path / "again", **options).fit(Wide(name), batches(), resume="auto")
    found, expected = outcome(tmp_path / "again"), outcome(tmp_path / "whole")
    for part in ("weights", "optimizer", "model.safetensors"):
        assert found[part] == expected[part]
    slots = [each for each in found["optimizer"] if each.endswith("net.0.weight/exp_avg.codes")]
    assert len(slots) == 1


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_about_as_the_whole_optimizer_does(name: str) -> None:
    def trained(name: str) -> float:
        task = Wide(name, schedule="constant")
        quiet(max_epochs=10).fit(task, batches())
        return sum(task.loss(task(each), each).item() for each in batches())

    plain = name.removesuffix("8bit").removesuffix("4bit").removesuffix("fp8")
    assert trained(name) == pytest.approx(trained(plain), rel=0.25)


def state_of(name: str) -> tuple[Any, Any, dict[str, Tensor], dict[str, Any], dict[Any, str]]:
    task = Wide(name)
    config = task.configure_optimizers()
    optimizer = config.factory(task.parameters(), lr=0.01)
    task.loss(task(batches()[0]), batches()[0]).backward()
    optimizer.step()
    names = {each: name for name, each in task.named_parameters()}
    tensors, meta = state_by_name(optimizer, names)
    return task, optimizer, tensors, json.loads(json.dumps(meta)), names


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_stored_by_its_parts_and_comes_back(name: str) -> None:
    task, optimizer, tensors, meta, names = state_of(name)
    assert {type(each) for each in tensors.values()} == {Tensor}
    stored = sum(each.nbytes for key, each in tensors.items() if key.startswith("net.0.weight/exp_avg"))
    assert stored < 2 * 4 * SIZE * SIZE / 3
    own = bits(tensors)
    twin = type(optimizer)(task.parameters(), lr=0.5)
    load_state_by_name(twin, names, {key: each.clone() for key, each in tensors.items()}, meta)
    assert bits(state_by_name(twin, names)[0]) == own
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if hasattr(value, "__tensor_flatten__"):
                assert twin.state[parameter][slot].__tensor_flatten__() == value.__tensor_flatten__()
    assert float(twin.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changed() -> None:
    task, optimizer, tensors, meta, names = state_of("adamw8bit")
    before = bits(tensors)
    twin = type(optimizer)(task.parameters(), lr=0.01, block_size=128)
    with pytest.raises(CheckpointError, match="same block_size"):
        load_state_by_name(twin, names, tensors, meta)
    assert not twin.state
    broken = copy.deepcopy(meta)
    broken["quantized"].append("net.0.weight/nothing")
    with pytest.raises(CheckpointError, match=r"lacks the parts of 'net.0.weight/nothing'"):
        load_state_by_name(optimizer, names, tensors, broken)
    broken["quantized"] = ["net.0.bias/exp_avg.codes"]
    with pytest.raises(CheckpointError, match="lacks the parts"):
        load_state_by_name(optimizer, names, tensors, broken)
    assert bits(state_by_name(optimizer, names)[0]) == before


def test_a_plan_and_a_report_count_the_bytes_of_the_parts() -> None:
    task, report = Wide(), MemoryReport(show=False)
    trainer = quiet(max_epochs=1, callbacks=[report])
    planned = trainer.plan(task, batches()).memory["optimizer"]
    trainer.fit(task, batches())
    # Of the 4096 in each of two slots: codes, 16 scales and 256 values. The rest as ever, and 4 counters.
    rest = 2 * 4 * (SIZE + SIZE + 1)
    assert planned == 2 * (4096 + 4 * 16 + 4 * 256) + rest + 4 * 4
    assert report.use is not None
    assert report.use.optimizer == planned
    released = quiet(max_epochs=1, callbacks=[report], memory=MemoryConfig(release_gradients=True))
    assert released.plan(task, batches()).memory["gradients"] == 4 * 4096
    released.fit(task, batches())
    assert 4 * 4096 <= report.use.gradients < report.use.parameters


def test_gradients_are_released_with_it_too() -> None:
    found, plain = Wide(), Wide()
    quiet(max_epochs=1, memory=MemoryConfig(release_gradients=True)).fit(found, batches())
    quiet(max_epochs=1).fit(plain, batches())
    assert weights(found) == weights(plain)


def in_ranks(strategy: str, directory: str) -> Any:
    with torch.compiler.set_stance("force_eager"):
        task = Wide()
        quiet(max_steps=2, strategy=strategy, devices=2, checkpoint=True, run_dir=directory).fit(
            task, batches()
        )
        return weights(task)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_ddp_trains_with_it_and_fsdp_refuses_it(tmp_path: Path) -> None:
    first, second = run_distributed(in_ranks, "ddp", str(tmp_path / "ddp"))
    assert first == second
    assert outcome_of(tmp_path / "ddp")
    with pytest.raises(Exception, match="AdamW8bit on sharded parameters"):
        run_distributed(in_ranks, "fsdp", str(tmp_path / "fsdp"))


def outcome_of(run_dir: Path) -> list[Path]:
    return list(run_dir.rglob("manifest.json"))


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.task.optim.quantized.is_installed", lambda _: False)
    monkeypatch.setitem(OPTIMIZERS._rows, "adamw8bit", QUANTIZED["adamw8bit"])
    with pytest.raises(MissingDependencyError, match=r"drivetrain\[quantized\]"):
        OptimizerConfig("adamw8bit").factory  # noqa: B018
    with pytest.raises(ConfigError, match="adamw8bit"):
        OptimizerConfig("adamw8bits")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "AdamW8bit.amsgrad=True.*'adamw'"),
        ({"block_size": "x"}, "block_size.*not 'x'"),
        ({"block_size": 0}, "block_size.*not 0"),
        ({"block_size": 100}, "block_size=100.*no state would be quantized.*4096 elements"),
    ],
)
def test_options_that_would_fail_or_do_nothing_are_refused_when_it_is_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(max_steps=1).fit(Wide(**options), [torch.ones(2, SIZE)])
