"""After a run under FSDP the task is an ordinary module, with which everything goes on."""

import copy
from typing import Any

import pytest
import torch
from tests.strategies.conforming import refused
from tests.strategies.test_meta_device import Small
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import nn

from drivetrain import FSDPConfig

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


BATCHES = [torch.arange(number, number + 8).reshape(2, 4) for number in range(4)]


def made_of(task: nn.Module) -> Any:  # all that a module has but its values
    def hooks(module: nn.Module) -> list[int]:
        return [len(value) for name, value in vars(module).items() if name.endswith("_hooks")]

    trained = [each.requires_grad for each in task.parameters()]
    return trained, [(type(each), sorted(vars(each)), hooks(each)) for each in task.modules()]


def goes_on() -> Any:
    torch.manual_seed(1)
    task, calls = Small(), []
    task.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    before, kept = made_of(task), task.last.weight.detach().clone()
    options: dict[str, Any] = {"max_epochs": 1, "devices": 2, "precision": "bf16-mixed"}
    sharded = quiet(strategy=FSDPConfig(activation_checkpointing="full", cpu_offload=True), **options)
    copied = quiet(strategy="ddp", **options)
    sharded.fit(task, BATCHES)
    assert made_of(task) == before
    assert all(type(each) is nn.Parameter for each in task.parameters())
    assert task.head.weight is task.embedding.weight
    assert not torch.equal(task.last.weight.float(), kept)
    calls.clear()
    task.eval()(BATCHES[0])
    assert calls == [1]
    found = sharded.validate(task, BATCHES)
    assert found == pytest.approx(copied.validate(task, BATCHES), rel=1e-2)
    assert len(sharded.predict(task, BATCHES)) == len(BATCHES)
    for trainer in (copied, sharded):
        trainer.fit(task, BATCHES)
    return copy.deepcopy(task).embedding.weight.float().tolist()


def test_task_trains_evaluates_and_copies_after_a_run_under_fsdp() -> None:
    first, second = on_two_ranks(goes_on)
    assert first == second


def shards_left() -> None:
    task = Small()
    trainer = quiet(max_steps=1, strategy=FSDPConfig(gather_at_end=False), devices=2)
    trainer.fit(task, BATCHES)
    assert hasattr(task.embedding.weight, "full_tensor")
    trainer.validate(task, BATCHES)


def test_gather_at_end_false_leaves_shards_which_are_then_refused() -> None:
    text = refused(shards_left)
    assert "StrategyError: this Small has only a shard of 'embedding.weight'" in text
    assert "Small.from_checkpoint(path)" in text
