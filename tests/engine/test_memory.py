"""What is traded for memory changes no number, is counted, and leaves an ordinary task behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.counting import Counting
from tests.support.outcome import outcome, weights
from tests.support.tasks import BLOCKS, Blocks, Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from drivetrain import (
    CompileConfig,
    ConfigError,
    DrivetrainError,
    Engine,
    FSDPConfig,
    LambdaCallback,
    MemoryConfig,
    OptimizerConfig,
    StrategyError,
    TaskModule,
    Throughput,
)
from drivetrain.cli.settings import Settings
from drivetrain.engine.memory import as_memory
from drivetrain.strategies.transforms.offload import Offload
from drivetrain.testing.distributed import run_distributed

SIZE = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.line(x)))


ADAMW = OptimizerConfig("adamw", lr=0.05, schedule="cosine")


class Deep(Blocks):
    """Blocks with dropout."""

    def __init__(self, optimizer: Any = ADAMW) -> None:
        super().__init__(Block, SIZE, optimizer)


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, SIZE, generator=generator) for _ in range(count)]


def fit(memory: Any, task: TaskModule | None = None, **options: Any) -> TaskModule:
    task = Deep() if task is None else task
    quiet(**{"max_epochs": 1, "memory": memory, **options}).fit(task, batches())
    return task


def again(spec: Any) -> MemoryConfig:
    return MemoryConfig(activation_checkpointing=spec)


def keep_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation == torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# Activation checkpointing.


@pytest.mark.parametrize(
    ("spec", "tanhs", "dropouts"),
    [
        (True, 2 * BLOCKS, 2 * BLOCKS),
        ("full", 2 * BLOCKS, 2 * BLOCKS),
        ("selective", 2 * BLOCKS, 2 * BLOCKS),
        (("Block",), 2 * BLOCKS, 2 * BLOCKS),
        ("Block", 2 * BLOCKS, 2 * BLOCKS),
        (Block, 2 * BLOCKS, 2 * BLOCKS),
        ((Block, nn.Linear), 2 * BLOCKS, 2 * BLOCKS),
        (("blocks.0", "blocks.2"), 2 * BLOCKS - 1, 2 * BLOCKS - 1),
        (("blocks.*.dropout",), BLOCKS, 2 * BLOCKS),
        (keep_tanh, BLOCKS, 2 * BLOCKS),
    ],
    ids=["true", "full", "selective", "classes", "name", "class", "mixed", "names", "globs", "policy"],
)
def test_what_is_computed_again_is_what_was_asked_for_and_no_bit_changes_with_dropout(
    spec: Any, tanhs: int, dropouts: int
) -> None:
    updates = len(batches())
    with Counting() as counting:
        found = fit(again(spec))
    assert weights(found) == weights(fit(None))
    seen = counting.seen
    assert (seen["tanh"], seen["bernoulli_"]) == (updates * tanhs, updates * dropouts)


def test_selective_keeps_the_products() -> None:
    with Counting() as counting:
        fit(again("selective"))
    with Counting() as plain:
        fit(None)
    assert counting.seen["addmm"] == plain.seen["addmm"] > 0


def in_ddp(memory: MemoryConfig | None) -> Any:
    return weights(fit(memory, strategy="ddp", devices=2))


def in_fsdp(memory: MemoryConfig | None) -> Any:
    return weights(fit(memory, strategy="fsdp", devices=2))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("run", [in_ddp, in_fsdp])
def test_ranks_train_the_same_weights(run: Any) -> None:
    assert run_distributed(run, again(True)) == run_distributed(run, None)


def test_a_task_is_an_ordinary_module_afterwards_and_can_be_trained_again() -> None:
    task, plain = fit(again(True)), fit(None)
    own = copy.deepcopy(task)
    for each, other in zip(own.modules(), plain.modules(), strict=True):
        assert set(vars(each)) == set(vars(other))
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
    assert weights(fit(again("selective"), task)) == weights(fit(None, plain))


def test_a_users_hooks_stay() -> None:
    task, seen = Deep(), []
    task.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    fit(again(True), task)
    before = len(seen)
    task(batches()[0])
    assert len(seen) == before + 1


def test_a_checkpoint_has_the_same_names_and_a_run_without_goes_on_from_it(tmp_path: Path) -> None:
    for name, memory in (("plain", None), ("again", again(True))):
        options = {"checkpoint": True, "run_dir": tmp_path / name, "loggers": ("csv", "jsonl")}
        quiet(max_steps=2, memory=memory, **options).fit(Deep(), batches())
        quiet(max_steps=4, **options).fit(Deep(), batches(), resume="auto")
    assert outcome(tmp_path / "again") == outcome(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_are_computed_again_within_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)
    task = fit(again(True), compile=CompileConfig(backend="aot_eager"))
    assert "forward" not in vars(task.get_submodule("blocks.0"))
    plain = fit(None, compile=CompileConfig(backend="aot_eager"))
    for (name, found), expected in zip(task.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_loop_of_ones_own_computes_again_too() -> None:
    def trained(memory: Any) -> tuple[Any, int]:
        with Engine(strategy="cpu", memory=memory) as engine, Counting() as counting:
            model, optimizer = engine.prepare(Deep(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
            torch.manual_seed(0)
            for batch in batches():
                engine.backward(model(batch).square().mean())
                engine.step(optimizer)
            return weights(model), counting.seen["tanh"]

    (plain, once), (found, twice) = trained(None), trained({"activation_checkpointing": "full"})
    assert found == plain
    assert twice == 2 * once


# Offload.


def test_large_tensors_wait_in_the_hosts_memory_and_parameters_stay_where_they_are() -> None:
    task = Deep()
    x = torch.randn(64, SIZE)
    task.eval()
    expected = torch.autograd.grad(task(x).square().mean(), list(task.parameters()))
    taken: list[Tensor] = []

    class Watched(Offload):
        def pack(self, tensor: Tensor) -> Any:
            packed = super().pack(tensor)
            if isinstance(packed, tuple):
                taken.append(tensor)
                assert packed[1].data_ptr() != tensor.data_ptr()
            return packed

    offload = Watched(task, at_least=64 * SIZE * 4, pinned=False)
    with offload():
        loss = task(x).square().mean()
    for found, wanted in zip(torch.autograd.grad(loss, list(task.parameters())), expected, strict=True):
        assert torch.equal(found, wanted)
    # Of each block the input and tanh's result, and the head's input; the outputs' 256 bytes are too few.
    assert [tuple(each.shape) for each in taken] == [(64, SIZE)] * (2 * BLOCKS + 1)
    taken.clear()
    with offload(), torch.no_grad():
        task(x)
    assert not taken
    with Watched(task, at_least=0, pinned=False)():
        task(x)
    held = {each.untyped_storage().data_ptr() for each in task.parameters()}
    assert taken
    assert held.isdisjoint(each.untyped_storage().data_ptr() for each in taken)


# Gradients that are freed at once.

RELEASE = MemoryConfig(release_gradients=True)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "rmsprop"])
def test_updates_within_backward_make_the_same_weights_state_and_rates(name: str, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(name, lr=0.05, weight_decay=0.1, schedule="cosine", warmup_steps=1)
    for kind, memory in (("plain", None), ("released", RELEASE)):
        options = {"checkpoint": True, "run_dir": tmp_path / kind, "loggers": ("csv", "jsonl")}
        options |= {"memory": memory}
        quiet(max_steps=2, **options).fit(Deep(optimizer), batches())
        quiet(max_steps=4, **options).fit(Deep(optimizer), batches(), resume="auto")
    assert outcome(tmp_path / "released") == outcome(tmp_path / "plain")


def test_updates_within_backward_under_autocast_make_the_same_weights() -> None:
    assert weights(fit(RELEASE, precision="bf16-mixed")) == weights(fit(None, precision="bf16-mixed"))


def test_a_torch_schedule_steps_as_ever() -> None:
    def configured(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    assert weights(fit(RELEASE, Deep(configured))) == weights(fit(None, Deep(configured)))


def test_no_two_gradients_are_there_at_once() -> None:
    task, most = Deep(), []
    for parameter in task.parameters():
        parameter.register_hook(
            lambda _: most.append(sum(each.grad is not None for each in task.parameters()))
        )
    fit(RELEASE, task)
    assert max(most) == 0
    assert all(not each._post_accumulate_grad_hooks for each in task.parameters())
    fit(None, task)
    assert max(most) > 1


class Twice(Deep):
    """Goes through one block twice, each time apart from the rest of the graph."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.blocks[0], x.requires_grad_(), use_reentrant=self.reentrant)
        return self.head(x)


def test_a_second_update_of_a_parameter_within_one_backward_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"second gradient of 'blocks\.0\.line\.\w+'.*use_reentrant=False"):
        fit(RELEASE, Twice())
    task, plain = Twice(), Twice()
    task.reentrant = plain.reentrant = False
    assert weights(fit(RELEASE, task)) == weights(fit(None, plain))


def test_a_hook_that_looks_at_no_gradient_is_no_reason_to_keep_them() -> None:
    fit(RELEASE, callbacks=[Throughput()])


@pytest.mark.parametrize("memory", [None, RELEASE])
def test_an_optimizer_that_needs_a_closure_is_refused(memory: Any) -> None:
    with pytest.raises(ConfigError, match=r"LBFGS cannot be used here.*closure"):
        fit(memory, Deep(lambda parameters: torch.optim.LBFGS(parameters)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0"),
        ({"micro_batch": 2}, "micro_batch=2: gradients of parts have to be kept"),
        ({"precision": "16-mixed"}, "'16-mixed'"),
        ({"strategy": "ddp", "devices": 2}, "strategy 'ddp'"),
        ({"strategy": "fsdp", "devices": 2}, "strategy 'fsdp'"),
        ({"callbacks": [LambdaCallback(on_before_optimizer_step=print)]}, "on_before_optimizer_step"),
    ],
)
def test_what_needs_gradients_after_backward_is_refused_when_the_trainer_is_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DrivetrainError, match=message):
        quiet(memory=RELEASE, **options)


def test_optimizers_that_need_all_gradients_are_refused() -> None:
    for optimizer, message in (
        (OptimizerConfig("sgd", max_grad_norm=1.0), "max_grad_norm=1.0"),
        (OptimizerConfig("muon"), "release_gradients with CombinedOptimizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(RELEASE, Deep(optimizer))
    with pytest.raises(ConfigError, match="several optimizers"):
        quiet(max_steps=1, memory=RELEASE).fit(Duel(), duels())
    with pytest.raises(ConfigError, match="16 bits"):
        fit(RELEASE, precision="bf16-true")
    with Engine(strategy="cpu", memory=RELEASE) as engine, pytest.raises(ConfigError, match=r"Trainer\.fit"):
        engine.prepare(Deep(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": (Block, 3)}, "'full', 'selective'.*not .*3"),
        ({"activation_checkpointing": dict}, "classes of modules.*not <class 'dict'>"),
        ({"activation_checkpointing": 1.5}, "not 1.5"),
        ({"offload_activations": 1}, "True or False"),
        ({"offload_at_least": -1}, "at least 0"),
        ({"release_gradients": None}, "True or False"),
        ({"recompute": True}, "no argument 'recompute'"),
    ],
)
def test_options_of_no_use_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryConfig(**options)


def test_a_trainer_refuses_what_its_strategy_cannot_do() -> None:
    with pytest.raises(StrategyError, match=r"offload_activations.*'cpu' device"):
        quiet(memory=MemoryConfig(offload_activations=True))
    with pytest.raises(StrategyError, match="give FSDPConfig"):
        quiet(strategy=FSDPConfig(activation_checkpointing="full"), devices=2, memory=again(True))
    with pytest.raises(ConfigError, match=r"memory is a MemoryConfig.*not 3"):
        quiet(memory=3)
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        quiet(memory={"activation_checkpoint": True})


def test_modules_that_are_not_there_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'Blocks'.*'Block'"):
        fit(again(("Blocks",)))
    with pytest.raises(ConfigError, match=r"'selectiv'.*'selective'"):
        fit(again("selectiv"))
    with pytest.raises(ConfigError, match="no repeated blocks"):
        quiet(max_steps=1, memory=again(True)).fit(Regression(), pairs())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("activation_checkpointing selective", again("selective")),
        ("activation_checkpointing true", again("full")),
        ("activation_checkpointing Block", again(("Block",))),
        ("activation_checkpointing blocks.*", again(("blocks.*",))),
        ("activation_checkpointing Block,encoder.*", again(("Block", "encoder.*"))),
        ("release_gradients true", RELEASE),
    ],
)
def test_it_is_given_on_the_command_line(given: str, expected: MemoryConfig) -> None:
    line = f"--trainer.strategy cpu --trainer.loggers= --trainer.memory.{given}"
    trainer = Settings("fit", "train", line.split()).trainer()
    assert as_memory(trainer.memory) == expected
