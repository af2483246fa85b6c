"""Modules split over processes, and the parts sharded over others: the numbers of one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, ConfigError, Engine, FSDPConfig, StrategyError, TaskModule
from drivetrain.callbacks import Throughput
from drivetrain.checkpoint import CheckpointConfig, load_weights
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.fsdp.tensor_parallel import planned
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.check import CHECKS, check_strategy
from drivetrain.testing.strategies.tasks import SampleNumbers, Tokens

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

SPLIT = FSDPConfig(tensor_parallel=2)


def split(world_size: int, **options: Any) -> FSDP:
    return FSDP(FSDPConfig(tensor_parallel=2, **options), world_size=world_size)


MAIN = ["same_as_the_big_batch", "frozen_and_tied", "checkpoints_have_plain_names", "resume_is_bitwise"]


def test_it_gives_the_same_updates_and_resumes_to_the_bit() -> None:
    check_strategy(split, checks=MAIN)


@pytest.mark.full
def test_it_conforms_in_all_else() -> None:
    check_strategy(split, checks=[name for name in CHECKS if name not in MAIN])


# On four processes the weights are split and sharded. A check of few runs shows that it is done right; the
# longer ones are those of two processes again.
SHORT = ["frozen_and_tied", "evaluation_counts_each_sample_once", "checkpoints_have_plain_names"]


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param([*SHORT, "resume_on_another_number_of_processes"], id="short", marks=pytest.mark.full),
        pytest.param([name for name in CHECKS if name not in SHORT], id="rest", marks=pytest.mark.extended),
    ],
)
def test_it_conforms_on_four_processes(checks: list[str]) -> None:
    check_strategy(split, 4, checks=checks)


OPTIONS: dict[str, dict[str, Any]] = {
    "replicated": {"sharding": "hybrid", "shard_size": 1},
    "no_shard": {"sharding": "no_shard"},
    "root": {"wrap": ()},
    "again": {"activation_checkpointing": "full"},
    "again_in_part": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "ignored": {"ignored": ("blocks.2*",)},
}


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(["frozen_and_tied"], id="short", marks=pytest.mark.full),
        pytest.param(["same_as_the_big_batch", "resume_is_bitwise"], id="rest", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_conforms_with_every_option(name: str, checks: list[str]) -> None:
    check_strategy(lambda world_size: split(world_size, **OPTIONS[name]), 4, checks=checks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("64", 1e-6), ("bf16-mixed", 0.05), ("bf16-true", 0.1), ("16-mixed", 0.05)]
)
def test_it_conforms_in_every_precision(precision: str, tolerance: float) -> None:
    checks = ["same_as_the_big_batch", "all_ranks_see_the_same", "resume_is_bitwise"]
    check_strategy(split, checks=checks, precision=precision, tolerance=tolerance)


class Block(nn.Module):
    """Attention over heads, whichever of them are here, and a network of two layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.between = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = [
            each(y).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        made: Tensor = x + self.dropout(self.narrow(self.wide(self.between(x)).relu()))
        return made


class Transformer(TaskModule):
    def __init__(self, dropout: float = 0.0, sequence: bool = False, plan: Mapping[str, Any] | None = None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embedding = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
            self.head = nn.Linear(8, 16)
        self.sequence, self.plan = sequence, plan

    def training_step(self, batch: Tensor) -> Tensor:
        (tokens,) = batch
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())

    def parallel_plan(self) -> Mapping[str, Any]:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
        )

        if self.plan is not None:
            return self.plan
        if not self.sequence:
            columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "wide")}
            return {**columns, "blocks.*.[on]*": RowwiseParallel()}
        whole: Any = {"input_layouts": Shard(1), "output_layouts": Shard(-1)}
        columns = {f"blocks.*.{name}": ColwiseParallel(**whole) for name in ("query", "key", "value", "wide")}
        return {
            "embedding": ColwiseParallel(output_layouts=Shard(1)),
            "blocks.*.be*": SequenceParallel(use_local_output=True),
            **columns,
            "blocks.*.[on]*": RowwiseParallel(output_layouts=Shard(1)),
            "head": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
        }


def sentences(batch_size: int, count: int = 12) -> DataLoader[Any]:
    tokens = torch.randint(16, (count, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


def whole(task: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = task.state_dict()
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in state.items()}


def fitted(task: TaskModule, strategy: Strategy, data: Any, **options: Any) -> dict[str, Tensor]:
    quiet(strategy=strategy, devices=strategy.world_size, **{"max_epochs": 2, **options}).fit(task, data)
    return whole(task)


def differing(size: int, per_rank: int, **options: Any) -> str:
    """The weights that are not those of one process after two epochs with clipping."""
    found = fitted(Transformer(**options), split(size), sentences(per_rank), max_grad_norm=0.5)
    alone = fitted(Transformer(**options), SingleDevice("cpu"), sentences(4), max_grad_norm=0.5)
    return ", ".join(
        name for name in alone if not torch.allclose(found[name], alone[name], rtol=1e-5, atol=1e-6)
    )


def test_a_transformer_is_split_by_heads_and_columns() -> None:
    assert run_distributed(differing, 4, 2, world_size=4) == [""] * 4


def test_activations_may_be_split_over_the_sequence_between_matrices() -> None:
    assert run_distributed(lambda: differing(4, 2, sequence=True), world_size=4) == [""] * 4


def test_dropout_draws_the_same_in_all_of_a_tensor_group() -> None:
    assert run_distributed(lambda: differing(2, 4, dropout=0.5)) == ["", ""]


def held() -> tuple[list[int], list[int]]:
    shapes: list[list[int]] = []

    class Look(Callback):
        def on_step_end(self, run: Any) -> None:
            task = run.task
            for parameter in (task.blocks[0].wide.weight, task.embedding.weight):
                shapes.append(list(parameter.to_local().shape))

    fitted(Transformer(), split(4), sentences(2), max_steps=1, max_epochs=None, callbacks=[Look()])
    return shapes[0], shapes[1]


def test_what_is_planned_is_split_and_all_is_sharded() -> None:
    # Of 16 x 8 a quarter, and of what no plan names a half, in both processes of a tensor group.
    assert run_distributed(held, world_size=4) == [([4, 8], [8, 8])] * 4


def flops() -> float | None:
    found = []
    for strategy in (split(2), SingleDevice("cpu")):
        throughput = Throughput()
        fitted(Transformer(), strategy, sentences(4), callbacks=[throughput])
        found.append(throughput.state_dict()["flops_per_sample"])
    return found[0] / found[1]


def test_the_operations_of_a_split_sample_are_those_of_a_whole_one() -> None:
    assert run_distributed(flops) == [1.0] * 2


class Seen(SampleNumbers):
    """Counts what it is shown, in a metric."""

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics import SumMetric

        return {"sum": SumMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> tuple[Any, ...]:
        return (outputs,)

    def training_step(self, batch: Any) -> Tensor:
        loss: Tensor = self(batch[0]).mean()
        return loss

    def validation_step(self, batch: Any) -> Any:
        from drivetrain import StepOutput

        seen = self(batch[0])
        return StepOutput(seen.mean(), seen)

    def tokens(self, batch: Any) -> int:
        return 10 * len(batch[0])


def counted(directory: str) -> tuple[Any, ...]:
    numbers = torch.arange(1.0, 12.0)[:, None]
    data = DataLoader(TensorDataset(numbers), batch_size=2)
    trainer = quiet(strategy=split(4), devices=4, max_epochs=1)
    result = trainer.fit(Seen(), data, data)
    files = trainer.predict(Seen(), data, save_to=directory)
    predicted = [each.tolist() for each in trainer.predict(Seen(), data)]
    progress = result.progress
    return (
        result.metrics["validation/sum"],
        result.metrics["validation/loss"],
        (progress.updates, progress.samples, progress.tokens),
        [number for each in predicted for number in each],
        len(files),
    )


def test_nothing_is_counted_twice(tmp_path: Path) -> None:
    numbers = [float(each) for each in range(1, 12)]
    expected = (66.0, 6.0, (3, 11, 110), numbers, 6)
    assert run_distributed(counted, str(tmp_path / "files"), world_size=4) == [expected] * 4
    assert len(list((tmp_path / "files").glob("*.safetensors"))) == 6


class Pair(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 4), nn.Linear(4, 1), nn.Softplus())
        for number, each in enumerate(self.parameters()):
            nn.init.constant_(each, 0.1 * number + 0.1)

    def parallel_plan(self) -> Mapping[str, Any]:
        return {"0": style("ColwiseParallel"), "1": style("RowwiseParallel")}


def looped(strategy: Strategy, batch_size: int) -> tuple[list[Any], list[float], int]:
    engine = Engine(strategy, devices=strategy.world_size)
    model, optimizer = engine.prepare(Pair(), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    numbers, norms = DataLoader(TensorDataset(torch.arange(1.0, 8.0)[:, None]), batch_size=batch_size), []
    for (x,) in engine.prepare_data(numbers):
        engine.backward(model(x).square().mean())
        norms.append(float(engine.step(optimizer, max_grad_norm=1.0).grad_norm))  # type: ignore[arg-type]
    engine.teardown()
    return [each.tolist() for each in whole(model).values()], norms, engine.progress.samples


def test_a_loop_of_ones_own_gives_the_same_too() -> None:
    weights, norms, samples = looped(SingleDevice("cpu"), 4)
    for found in run_distributed(lambda: looped(split(4), 2), world_size=4):
        assert (found[1], found[2]) == (pytest.approx(norms, rel=1e-6), samples)
        for mine, theirs in zip(found[0], weights, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-6, atol=1e-6)


def resumed(directory: str, updates: int | None) -> tuple[Any, dict[str, float], int]:
    """Four samples an update, from where the run stood."""
    size = int(os.environ["WORLD_SIZE"])
    task, strategy = Transformer(), split(size) if size > 1 else FSDP()
    trainer = quiet(
        strategy=strategy, devices=size, run_dir=directory, checkpoint=CheckpointConfig(best=0),
        max_epochs=2, max_steps=updates, max_grad_norm=0.5, log_every="2 steps",
    )  # fmt: skip
    result = trainer.fit(task, sentences(4 // strategy.data_size), resume="auto")
    return (
        {name: each.tolist() for name, each in whole(task).items()},
        result.metrics,
        result.progress.samples,
    )


def test_a_run_goes_on_whatever_the_processes_and_their_split(tmp_path: Path) -> None:
    straight, moved = str(tmp_path / "straight"), str(tmp_path / "moved")
    expected, metrics, samples = run_distributed(resumed, straight, None, world_size=1)[0]
    for size, updates in ((4, 1), (2, 2), (1, 3), (2, 4), (4, 5)):
        run_distributed(resumed, moved, updates, world_size=size)
    for found, seen, count in run_distributed(resumed, moved, None, world_size=4):
        assert (seen, count) == (pytest.approx(metrics, rel=1e-5), samples)
        for name, each in expected.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(each), rtol=1e-5, atol=1e-6)
    exported = load_weights(tmp_path / "moved" / "model.safetensors")
    assert {name: each.tolist() for name, each in exported.items()} == found


def one_process_a_part() -> None:
    fitted(Transformer(plan={"no_such_module": 1}), FSDP(world_size=2), sentences(2), max_epochs=1)


def test_without_tensor_parallel_no_plan_is_looked_at() -> None:
    run_distributed(one_process_a_part)


def style(name: str, **options: Any) -> Any:
    import torch.distributed.tensor.parallel as parallel

    return getattr(parallel, name)(**options)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({}, r"define Transformer\.parallel_plan\(\)"),
        ([("head", 1)], "parallel_plan.* must return a mapping .* not a list"),
        ({"head": "columns"}, "has a str for 'head'"),
        ({"heads": style("ColwiseParallel")}, "not a module of the task. Did you mean 'head'"),
        ({"blocks.*.wider": style("ColwiseParallel")}, "not a module of the task"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(plan: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(Transformer(plan=plan))


def test_a_star_stays_within_the_dots() -> None:
    task = Transformer(plan={"blocks.*.w*": style("ColwiseParallel")})
    assert [each.name for each in planned(task)] == ["blocks.0.wide", "blocks.1.wide"]
    with pytest.raises(ConfigError, match=r"names 'blocks\.\*wide'"):
        planned(Transformer(plan={"blocks.*wide": style("ColwiseParallel")}))


class Tied(Transformer):
    """Splits the two uses of one parameter in different dimensions."""

    def __init__(self) -> None:
        super().__init__(plan={"embedding": style("ColwiseParallel"), "head": style("ColwiseParallel")})
        self.head.weight = self.embedding.weight


class Uneven(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 5)

    def parallel_plan(self) -> Mapping[str, Any]:
        return {"line": style("ColwiseParallel")}


def refusal(make: Any, config: FSDPConfig) -> None:
    fitted(make(), FSDP(config, world_size=2), sentences(2))


def columns_of_a_block() -> TaskModule:
    return Transformer(plan={"blocks.0": style("ColwiseParallel")})


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (columns_of_a_block, {}, r"'blocks\.0' \(Block\): Colwise"),
        (Tokens, {"ignored": ("head",)}, r"'head\.weight' is both in FSDPConfig\(ignored"),
        (Tied, {}, "one parameter.*different ways"),
        (Uneven, {}, r"tensor_parallel=2 does not divide dimension 0 of 'line\.weight'.*\[5, 6\]"),
    ],
)
def test_what_cannot_be_split_is_named(make: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        run_distributed(refusal, make, FSDPConfig(tensor_parallel=2, **options))


def test_the_split_must_divide_the_processes() -> None:
    with pytest.raises(StrategyError, match="tensor_parallel=2 does not divide 3 processes"):
        FSDP(SPLIT, world_size=3)
    with pytest.raises(StrategyError, match="shard_size=4 does not divide 2 groups of 2 processes"):
        split(4, sharding="hybrid", shard_size=4)
