"""A model made on the meta device: the values of the constructor, part by part."""

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import FSDPConfig, StrategyError, TaskModule
from drivetrain.checkpoint import export_weights
from drivetrain.checkpoint.weights import stored_rows
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.meta_device import Materialization, on_meta
from drivetrain.task.model_info import ModelInfo

gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.line(self.attention(y, y, y, need_weights=False)[0])


class Small(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.last = nn.Linear(16, 1)
        self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.last(self.head(self.norm(x.flatten(0, 1))))
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    def model_info(self) -> ModelInfo:
        return ModelInfo(parallel_plan=self.planned())

    def planned(self) -> Mapping[str, Any]:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "blocks.*.line": ColwiseParallel(output_layouts=Replicate()),
            "embedding": ColwiseParallel(output_layouts=Replicate()),
            "head": RowwiseParallel(input_layouts=Replicate()),
        }


class Rescaled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)


def make(kind: type[TaskModule], device: str) -> TaskModule:
    torch.manual_seed(4 + int(os.environ.get("RANK", "0")))
    with torch.device(device):
        return kind()


def whole(task: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = task.state_dict()
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in state.items()}


def trained(
    kind: type[TaskModule],
    config: FSDPConfig,
    precision: str,
    weights: Path | None = None,
    devices: tuple[str, ...] = ("meta", "meta"),
) -> str:
    world_size = torch.distributed.get_world_size()
    states = []
    for device in (devices[int(os.environ["RANK"])], "cpu"):
        task = make(kind, device)
        if weights is not None:
            task.load_weights(weights)
        strategy = FSDP(config, world_size=world_size)
        data = [torch.arange(8).reshape(2, 4)] * (2 * world_size)
        quiet(max_steps=2, strategy=strategy, devices=world_size, precision=precision).fit(task, data)
        assert not on_meta(task)
        states.append(whole(task))
    meta, plain = states
    assert list(meta) == list(plain)
    return ", ".join(name for name in meta if not torch.equal(meta[name], plain[name]))


CASES: list[tuple[type[TaskModule], dict[str, Any], str]] = [
    (Small, {"wrap": ("Linear", "Block")}, "bf16-true"),
    (Rescaled, {"sharding": "shard_grad_op"}, "32"),
    (Rescaled, {"ignored": ("last",), "tensor_parallel": 2}, "bf16-true"),
    (Small, {"cpu_offload": True, "activation_checkpointing": "full"}, "bf16-mixed"),
    (Small, {"ignored": ("blocks.1", "*.bias", "head")}, "32"),
]


@gloo
@pytest.mark.parametrize("cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.nightly)], ids=len)
def test_task_from_the_meta_device_trains_as_one_from_the_cpu(cases: Any) -> None:
    def different() -> list[str]:
        return [trained(kind, FSDPConfig(**options), precision) for kind, options, precision in cases]

    assert on_two_ranks(different) == [[""] * len(cases)] * 2


class Turned(Rescaled):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = super().forward(tokens)
        return outputs * self.turn.angles.to(outputs.dtype)


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(1), persistent=False)
        self.gain = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.fill_(0.3)
        nn.init.normal_(self.gain)


STORED: list[tuple[type[TaskModule], dict[str, Any], str]] = [
    (Turned, {"ignored": ("last",), "tensor_parallel": 2}, "bf16-true"),
    (Turned, {"wrap": ("Linear", "Block")}, "32"),
    (Turned, {"cpu_offload": True, "activation_checkpointing": "full"}, "bf16-mixed"),
    (Turned, {"ignored": ("blocks.1", "*.bias", "head"), "sharding": "shard_grad_op"}, "32"),
]


@gloo
@pytest.mark.parametrize("cases", [STORED[:1], pytest.param(STORED[1:], marks=pytest.mark.nightly)], ids=len)
def test_weights_that_each_rank_reads_in_rows_are_those_of_a_task_that_loaded_them(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor = make(Turned, "cpu")
    stored = {name: torch.randn(each.shape) for name, each in donor.state_dict().items() if "num" not in name}
    stored["norm.running_var"].abs_()
    stored["norm.num_batches_tracked"] = torch.tensor(3)
    del stored["head.weight"]  # tied
    export_weights(stored, tmp_path / "model.safetensors", max_shard_size="2 KB")

    def different() -> list[str]:
        monkeypatch.setattr(stored_rows, "_PIECE", 300)
        return [
            trained(kind, FSDPConfig(**options), precision, tmp_path) for kind, options, precision in cases
        ]

    assert on_two_ranks(different) == [[""] * len(cases)] * 2


@gloo
def test_a_task_that_only_some_ranks_have_made_on_the_meta_device_is_refused() -> None:
    def different(*devices: str) -> str:
        return trained(Small, FSDPConfig(), "32", devices=devices)

    with pytest.raises(RuntimeError, match="rank 1 has made Small on the meta device, and rank 0 has not"):
        on_two_ranks(different, "cpu", "meta")


def materialize(task: nn.Module, parts: list[nn.Module], hand_on: Any) -> None:
    Materialization(task).run(parts, torch.device("cpu"), 1, hand_on)


def test_materialization_holds_one_whole_part_at_a_time() -> None:
    task = make(Small, "meta")
    handed: list[weakref.ref[nn.Parameter]] = []

    def hand_on(part: nn.Module) -> None:
        assert not on_meta(part)
        assert [each for each in handed if each() is not None] == []
        for module in part.modules():
            for name, each in list(module.named_parameters(recurse=False)):
                handed.append(weakref.ref(each))
                setattr(module, name, nn.Parameter(each.detach()[:1].clone()))
        last = task.blocks[-1]  # type: ignore[index]
        assert part is last or on_meta(last)

    materialize(task, list(task.blocks), hand_on)  # type: ignore[arg-type]
    assert len(handed) == sum(1 for _ in task.blocks.parameters())  # type: ignore[union-attr]


def test_module_that_cannot_make_its_values_is_refused_by_name() -> None:
    task = TaskModule()
    task.inner = nn.Module()
    task.inner.register_buffer("angles", torch.arange(4.0, device="meta"))
    with pytest.raises(StrategyError, match=r"'inner' \(Module\) cannot initialise angles.*reset_par"):
        materialize(task, [], lambda part: None)
