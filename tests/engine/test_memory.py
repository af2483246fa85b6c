"""Memory options (`MemoryConfig`): they change no number, are counted, and leave an ordinary task behind."""

import copy
from typing import Any

import pytest
import torch
from tests.support.outcome import Counting, weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import BLOCKS, Blocks, Regression, quiet
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from drivetrain import ConfigError, FSDPConfig, MemoryConfig, OptimizerConfig, StrategyError

SIZE = 8
ADAMW = OptimizerConfig("adamw", lr=0.05, schedule="cosine")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.line(x)))


class Deep(Blocks):
    def __init__(self, optimizer: Any = ADAMW) -> None:
        super().__init__(Block, SIZE, optimizer)


class Apart(Deep):  # goes through one block twice, each time apart from the rest of the graph
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.blocks[0], x.requires_grad_(), use_reentrant=True)
        return self.head(x)


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, SIZE, generator=generator) for _ in range(count)]


def fit(memory: Any, task: Any = None, **options: Any) -> Any:
    task = Deep() if task is None else task
    length = {} if "max_steps" in options else {"max_epochs": 1}
    quiet(**length, memory=memory, **options).fit(task, batches())
    return task


def again(spec: Any) -> MemoryConfig:
    return MemoryConfig(activation_checkpointing=spec)


def keep_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation == torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("spec", "kept"),
    [(True, 0), ((Block, nn.Linear), 0), (("blocks.0", "blocks.2"), 1), (keep_tanh, 0)],
    ids=["true", "types", "names", "policy"],
)
def test_activation_checkpointing_recomputes_what_it_should_and_changes_no_bit(spec: Any, kept: int) -> None:
    with Counting() as counting:
        found = fit(again(spec))
    assert weights(found) == weights(fit(None))
    steps, seen, twice = len(batches()), counting.seen, 2 * BLOCKS - kept
    tanhs = BLOCKS if spec is keep_tanh else twice
    assert (seen["tanh"], seen["bernoulli_"]) == (steps * tanhs, steps * twice)


def test_selective_activation_checkpointing_keeps_the_products_and_globs_choose_modules() -> None:
    with Counting() as plain:
        right = weights(fit(None))
    for spec, tanhs in (("selective", 2), (("blocks.*.dropout",), 1)):
        with Counting() as counting:
            assert weights(fit(again(spec))) == right
        assert counting.seen["addmm"] == plain.seen["addmm"] > 0
        assert counting.seen["tanh"] == tanhs * plain.seen["tanh"]
        assert counting.seen["bernoulli_"] == 2 * plain.seen["bernoulli_"]


def on_ranks(strategy: str, memory: MemoryConfig | None) -> Any:
    return weights(fit(memory, strategy=strategy, devices=2, max_steps=1))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_ranks_train_the_same_weights_with_activation_checkpointing(strategy: str) -> None:
    assert on_two_ranks(on_ranks, strategy, again(True)) == on_two_ranks(on_ranks, strategy, None)


def test_a_task_is_an_ordinary_module_after_activation_checkpointing() -> None:
    task, plain, seen = Deep(), fit(None), []
    hook = task.blocks[0].register_forward_hook(lambda *_: seen.append(1))  # a user's hook stays
    fit(again(True), task)
    seen.clear()
    task(batches()[0])
    assert seen == [1]
    hook.remove()
    for each, other in zip(copy.deepcopy(task).modules(), plain.modules(), strict=True):
        assert set(vars(each)) == set(vars(other))
        assert not each._forward_hooks | each._forward_pre_hooks
    assert weights(fit(again("selective"), task)) == weights(fit(None, plain))


def test_refusals_of_memory_options() -> None:
    sharded = FSDPConfig(activation_checkpointing="full")
    cases: dict[str, tuple[Any, ...]] = {
        "shards": (lambda: quiet(strategy=sharded, devices=2, memory=again(True)), "give FSDPConfig"),
        "a misspelt key": (lambda: quiet(memory={"activation_checkpoint": True}), "activation_checkpointing"),
        "no such mode": (lambda: fit(again("selectiv")), "'selectiv'", "'selective'"),
        "no blocks": (lambda: fit(again(True), Regression()), "no repeated blocks"),
    }
    assert_refused((ConfigError, StrategyError), cases)
