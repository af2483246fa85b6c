"""After a run under FSDP the task is an ordinary module, with which everything goes on."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.conforming import refused
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import Engine, FSDPConfig, TaskModule
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.narrow(self.wide(x).relu()).tanh()
        return made


class Deep(TaskModule):
    """Blocks, tied weights, a frozen bias, buffers, and hooks of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 8, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.BatchNorm1d(8)
        self.again = nn.Linear(4, 8, bias=False)
        self.again.weight = self.embedding.weight
        self.norm.bias.requires_grad_(False)
        self.calls = 0
        self.blocks[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.blocks(self.embedding(x))) + self.again(x)
        return made

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    def parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"blocks.*.wide": ColwiseParallel(), "blocks.*.narrow": RowwiseParallel()}


def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator),) for _ in range(4)]


def made_of(task: nn.Module) -> Any:
    """All that a module has but its values."""
    return [
        (
            type(each),
            sorted(vars(each)),
            [len(value) for name, value in vars(each).items() if name.endswith("_hooks")],
        )
        for each in task.modules()
    ]


def goes_on(config: FSDPConfig, precision: str) -> Any:
    """Trains, and does everything else with the same task."""
    torch.manual_seed(1)
    task = Deep()
    before, kept = made_of(task), task.blocks[0].wide.weight.detach().clone()  # type: ignore[union-attr]
    world_size = torch.distributed.get_world_size()
    sharded = quiet(
        max_epochs=1, strategy=FSDP(config, world_size=world_size), devices=world_size, precision=precision
    )
    copied = quiet(max_epochs=1, strategy=DDP(world_size=world_size), devices=world_size, precision=precision)
    sharded.fit(task, batches())
    assert made_of(task) == before
    assert all(type(each) is nn.Parameter for each in task.parameters())
    assert task.again.weight is task.embedding.weight
    assert not task.norm.bias.requires_grad
    assert not torch.equal(task.blocks[0].wide.weight.float(), kept)  # type: ignore[union-attr]
    calls = task.calls
    task.eval()
    task(batches()[0][0].to(task.embedding.weight.dtype))
    assert task.calls == calls + 1
    found = sharded.validate(task, batches())
    assert found == pytest.approx(copied.validate(task, batches()), rel=1e-2)
    assert len(sharded.predict(task, batches())) == len(batches())
    for trainer in (sharded, copied, sharded):
        trainer.fit(task, batches())
    return copy.deepcopy(task).embedding.weight.float().tolist()


def test_task_trains_evaluates_and_copies_after_a_run_under_fsdp() -> None:
    offloaded = FSDPConfig(activation_checkpointing="full", cpu_offload=True)

    def weights() -> list[Any]:
        return [goes_on(FSDPConfig(), "32"), goes_on(offloaded, "bf16-mixed")]

    first, second = on_two_ranks(weights)
    assert first == second


@pytest.mark.nightly
def test_task_trains_evaluates_and_copies_after_a_run_on_four_ranks() -> None:
    hybrid = FSDPConfig(ignored=("norm",), sharding="hybrid", shard_size=2)
    for config, precision in ((FSDPConfig(tensor_parallel=2), "32"), (hybrid, "bf16-true")):
        weights = run_distributed(goes_on, config, precision, world_size=4)
        assert all(each == weights[0] for each in weights)


def shards_left() -> None:
    task = Deep()
    trainer = quiet(max_steps=1, strategy=FSDP(FSDPConfig(gather_at_end=False), world_size=2), devices=2)
    trainer.fit(task, batches())
    assert hasattr(task.embedding.weight, "full_tensor")
    trainer.validate(task, batches())


def test_gather_at_end_false_leaves_shards_which_are_then_refused() -> None:
    text = refused(shards_left)
    assert "StrategyError: this Deep has only a shard of 'embedding.weight'" in text
    assert "Deep.from_checkpoint(path)" in text


def test_engine_leaves_an_ordinary_module() -> None:
    def own_loop() -> bool:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        before = made_of(net)
        engine = Engine(FSDP(world_size=2), devices=2)
        model, optimizer = engine.prepare(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        engine.backward(model(torch.ones(2, 4)).square().mean())
        engine.step(optimizer)
        engine.teardown()
        return made_of(net) == before and bool(net(torch.ones(2, 4)).isfinite().all())

    assert on_two_ranks(own_loop) == [True, True]


@pytest.mark.landing
def test_second_run_of_a_program_without_file_saves_what_each_process_has() -> None:
    program = (Path(__file__).parents[1] / "programs" / "fsdp_twice.py").read_text(encoding="utf-8")
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
