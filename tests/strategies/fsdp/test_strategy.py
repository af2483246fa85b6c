"""A model in shards: the same numbers whatever is sharded, wrapped, offloaded or computed again."""

from typing import Any

import pytest
import torch
from tests.strategies.conforming import conforms
from tests.support.outcome import Counting
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Blocks, Regression, pairs, quiet
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy

from drivetrain import ConfigError, FSDPConfig, LambdaCallback, OptimizerConfig, StrategyError, TaskModule
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.wrapping import around, units
from drivetrain.task.blocks import repeated_blocks
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.optim.build import build_optimizer
from drivetrain.task.task import StepModule
from drivetrain.testing.strategies.check import check_strategy
from drivetrain.testing.strategies.tasks import Tokens

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def fsdp(world_size: int, **options: Any) -> FSDP:
    return FSDP(FSDPConfig(**options), world_size=world_size)


def of(**options: Any) -> Any:
    return lambda world_size: fsdp(world_size, **options)


@pytest.mark.landing(long=True)
def test_fsdp_conforms() -> None:
    check_strategy(fsdp, 2)
    conforms(fsdp, "callbacks_decide_the_same", "one_rank_can_stop_all")


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 3])
def test_fsdp_conforms_on_other_numbers_of_processes(world_size: int) -> None:
    check_strategy(fsdp, world_size)


OPTIONS: dict[str, dict[str, Any]] = {
    "shard_grad_op": {"sharding": "shard_grad_op"},
    "no_shard": {"sharding": "no_shard", "wrap": ()},
    "by_class": {"wrap": ("Sequential",), "activation_checkpointing": ("Sequential",)},
    "by_size": {"wrap": 100, "activation_checkpointing": "selective"},
    "by_function": {"wrap": lambda module: isinstance(module, nn.Embedding), "cpu_offload": True},
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 2, "activation_checkpointing": "full"},
    "ignored": {"ignored": ("blocks.1", "*.bias")},
    "each": {"reduce_each_micro_batch": True, "ignored": ("*.bias",)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fsdp_options_change_no_number(name: str) -> None:
    conforms(of(**OPTIONS[name]), "steps")


@pytest.mark.parametrize(
    "check", ["frozen_and_tied", "generator_steps", "all_begin_with_the_weights_of_rank_0"]
)
def test_fsdp_steps_freeze_generate_and_begin_as_in_one_process(check: str) -> None:
    conforms(fsdp, check)


CHECKED = ["frozen_and_tied", "parameters_may_be_unfrozen", "resume_is_bitwise"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_fsdp_options_conform(name: str) -> None:
    check_strategy(of(**OPTIONS[name]), checks=[*CHECKED, "same_as_the_big_batch"])


@pytest.mark.nightly
def test_fsdp_hybrid_shards_conform() -> None:
    hybrid = of(sharding="hybrid", shard_size=2)
    check_strategy(hybrid, 4, checks=["same_as_the_big_batch", "resume_is_bitwise"])
    for ignored in (("embedding.weight",), ("*",)):
        check_strategy(of(ignored=ignored), checks=["same_as_the_big_batch", "resume_is_bitwise"])
    check_strategy(of(ignored=("discriminator", "generator.bias")), checks=["generator_steps"])


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU())


def held(sharding: str) -> list[int]:
    sizes: list[int] = []

    def look(run: Any) -> None:
        (updater,) = run.engine.updaters.values()
        states = [each for state in updater.optimizer.state.values() for each in state.values()]
        for tensors in (list(run.task.parameters()), states):
            local: list[Any] = [getattr(each, "_local_tensor", each) for each in tensors]
            sizes.append(sum(each.numel() * each.element_size() for each in local if each.ndim))

    options = {"strategy": fsdp(2, sharding=sharding), "devices": 2}
    task = Blocks(layer, 64, OptimizerConfig("adamw", lr=0.1))
    task.head = nn.Linear(64, 2)
    quiet(max_steps=1, callbacks=[LambdaCallback(on_step_end=look)], **options).fit(
        task, [torch.ones(4, 64)] * 2
    )
    return sizes


def have_gradients(each: bool) -> list[bool]:  # whether shards have gradients after each of two micro-batches
    found: list[bool] = []
    look = LambdaCallback(on_micro_batch_end=lambda run: found.append(run.task.head.weight.grad is not None))
    strategy = fsdp(2, reduce_each_micro_batch=each)
    trainer = quiet(
        max_steps=1, strategy=strategy, devices=2, gradient_accumulation_steps=2, callbacks=[look]
    )
    task = Blocks(layer, 64, OptimizerConfig("sgd", lr=0.1))
    task.head = nn.Linear(64, 2)
    trainer.fit(task, [torch.ones(4, 64)] * 4)
    return found


def test_gradients_are_reduced_in_the_last_micro_batch_or_in_each() -> None:
    assert on_two_ranks(have_gradients, False) == [[False, True]] * 2
    assert on_two_ranks(have_gradients, True) == [[True, True]] * 2


def test_process_keeps_its_part_of_weights_and_optimizer() -> None:
    whole = 4 * (3 * 64 * 65 + 2 * 65)
    parts = {"full_shard": 2, "shard_grad_op": 2, "no_shard": 1}
    for found in on_two_ranks(lambda: {each: held(each) for each in parts}):
        assert found == {each: [whole // part, 2 * whole // part] for each, part in parts.items()}


def test_repeated_blocks_are_found_and_those_with_tied_parameters_are_not() -> None:
    task = Tokens()
    assert repeated_blocks(task) == list(task.blocks)
    assert units(task, ("Embedding",)) == [task.embedding]
    tied = Tokens(tied=True)
    assert units(tied, ("Embedding",)) == []
    task.blocks[1][0].weight = task.blocks[0][0].weight
    assert repeated_blocks(task) == [task.blocks[2]]


def test_units_to_shard_are_those_of_the_tasks_classes_and_never_containers() -> None:
    class Named(Tokens):
        def model_info(self) -> ModelInfo:
            return ModelInfo(block_classes=("Linear", "Embedding"))

    task = Named()
    expected = [each for each in task.modules() if isinstance(each, (nn.Linear, nn.Embedding))]
    assert units(task, "auto") == expected
    assert not any(isinstance(each, nn.Embedding) for each in units(Named(tied=True), "auto"))


def test_an_embedding_and_a_head_of_its_shape_are_gathered_apart_around_the_blocks() -> None:
    task, without = Tokens(), Tokens()
    without.head = nn.Linear(8, 12, bias=False)
    assert around(task, task.blocks) == ([task.embedding], [task.head])
    assert around(Tokens(tied=True), ()) == around(without, ()) == ([], [])
    assert around(task, (), [task.head]) == ([], [])  # it is split by tensor parallelism
    task.head.bias = nn.Parameter(torch.zeros(len(task.embedding.weight)))
    assert around(task, task.blocks) == ([task.embedding], [])  # it returns a view


class Normed(TaskModule):  # computes a batch norm's mean over what a matrix product gives
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: Tensor) -> Tensor:
        made: Tensor = self.layers(features)
        return made

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def test_batch_norms_in_shards_end_as_alone_in_every_precision() -> None:
    def compare() -> None:  # both processes see the batches of the one
        same = [batch for batch in pairs(12, 4) for _ in range(2)]
        for precision, tolerance in (("32", 1e-6), ("bf16-mixed", 1e-2), ("bf16-true", 1e-2)):
            states: list[tuple[Tensor, Tensor]] = []
            for strategy, data in ((SingleDevice("cpu"), same[::2]), (fsdp(2), same)):
                task = Normed()
                options = {"devices": strategy.world_size, "precision": precision}
                quiet(max_epochs=1, strategy=strategy, **options).fit(task, data)
                norm: Any = task.layers[1]
                states.append((norm.weight.detach(), norm.running_mean))
            torch.testing.assert_close(states[1], states[0], rtol=tolerance, atol=tolerance)

    on_two_ranks(compare)


# Recomputation and prefetching, counted.


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))


def keep_tanh(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation == torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(again: Any) -> tuple[dict[str, list[Any]], int, int]:
    task = Blocks(dropping, 4, OptimizerConfig("sgd", lr=0.1))
    task.head = nn.Identity()  # type: ignore[assignment]
    data = [torch.arange(8.0).reshape(2, 4) + number for number in range(6)]
    torch.manual_seed(3)
    with Counting() as counting:
        quiet(max_epochs=1, strategy=fsdp(2, activation_checkpointing=again), devices=2).fit(task, data)
    weights = {name: each.tolist() for name, each in task.state_dict().items()}
    return weights, counting.seen["addmm"] // 3, counting.seen["tanh"] // 3


def test_activation_checkpointing_recomputes_only_what_is_not_kept_and_changes_no_bit() -> None:
    kinds = {"full": (6, 6), "selective": (3, 6), ("Sequential",): (6, 6), keep_tanh: (6, 3)}
    for plain, *others in on_two_ranks(lambda: [recomputed(each) for each in (False, *kinds)]):
        assert plain[1:] == (3, 3)
        for counts, found in zip(kinds.values(), others, strict=True):
            assert found == (plain[0], *counts)


def prefetched(forward: int, backward: int) -> list[str]:  # what was gathered ahead in a step, in order
    task = Blocks(dropping, 4, OptimizerConfig("sgd", lr=0.1))
    task.head = nn.Identity()  # type: ignore[assignment]
    strategy = fsdp(2, forward_prefetch=forward, backward_prefetch=backward)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        quiet(max_steps=1, strategy=strategy, devices=2).fit(task, [torch.ones(2, 4)] * 2)
    names = [each.name.removeprefix("FSDP::") for each in seen.events() if "prefetch for" in each.name]
    return [each.replace("_prefetch for task.blocks.", " ") for each in names]


def test_prefetch_gathers_as_many_blocks_ahead_as_asked_for() -> None:
    none, one, two = on_two_ranks(lambda: [prefetched(0, 0), prefetched(0, 1), prefetched(2, 2)])[0]
    assert none == one == ["backward 1", "backward 0"]  # backward gathers one ahead by itself
    assert two == ["forward 1", "forward 2", "forward 2", "backward 1", "backward 0", "backward 0"]


# Parameters that every process keeps whole.


class Scaled(Regression):
    def __init__(self) -> None:
        super().__init__(OptimizerConfig("adamw", lr=0.1))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * super().forward(features) + self.none.sum()


def kept(*ignored: str) -> tuple[dict[str, str], float]:
    kinds: dict[str, str] = {}

    def look(run: Any) -> None:
        kinds.update({name: type(each).__name__ for name, each in run.task.named_parameters()})
        assert run.task.line.weight.no_decay  # what a program sets on a parameter is on its shard

    task = Scaled()
    weight: Any = task.line.weight
    weight.no_decay = True
    options = {"max_grad_norm": 0.1, "callbacks": [LambdaCallback(on_step_end=look)]}
    quiet(max_epochs=1, strategy=fsdp(2, ignored=ignored), devices=2, **options).fit(task, pairs())
    assert vars(task.line.weight) == {"no_decay": True}
    return kinds, task.scale.item()


def test_scalars_empty_and_ignored_parameters_are_plain_and_the_same_on_all_ranks() -> None:
    first, second = on_two_ranks(lambda: [kept(), kept("line.bias")])
    assert first == second
    for (kinds, scale), bias in zip(first, ("DTensor", "Parameter"), strict=True):
        whole = {"scale": "Parameter", "none": "Parameter"}
        assert kinds == {"line.weight": "DTensor", "line.bias": bias, **whole}
        assert scale != 2.0


def test_optimizers_that_torch_cannot_step_on_shards_are_refused_by_name() -> None:
    def refused() -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(module := nn.Linear(4, 2))
        for name in ("adafactor", "rprop"):
            with pytest.raises(ConfigError, match=f"'{name}' cannot train the 2 sharded parameters"):
                build_optimizer(OptimizerConfig(name), module)

    on_two_ranks(refused)


def test_a_task_that_cannot_be_sharded_is_refused_by_name() -> None:
    def refused() -> None:
        listed, hooked, accumulated = Regression(), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        listed.line.held = {"weights": [listed.line.weight]}  # type: ignore[assignment]
        listed.recurrent = nn.LSTM(1, 4)  # torch keeps its list of weights current
        hooked.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        accumulated.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        for extra, match in (
            (None, r"'line.held' of Regression is a dict .*ParameterList"),
            (hooked, "'extra' has hooks.*on_before_optimizer_step"),
            (accumulated, "'extra' has hooks"),
            (nn.Parameter(torch.ones(4, 4)[:, :2]), r"'extra' has strides \(4, 1\)"),
            (nn.Parameter(torch.ones(4) * 1j), r"complex64 \('extra'\) and float32 .*ignored="),
        ):
            task = listed if extra is None else Regression()
            task.extra = extra
            strategy = fsdp(2)
            strategy.setup()
            try:
                with pytest.raises(StrategyError, match=match):
                    strategy.prepare(StepModule(task), None, as_precision("32"))
            finally:
                strategy.teardown()

    on_two_ranks(refused)
