"""Modules split over processes, and the parts sharded over others: the numbers of one process."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.conforming import conforms
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, FSDPConfig, LambdaCallback, StrategyError, TaskModule, Throughput
from drivetrain.core.types import StepOutput
from drivetrain.losses import cross_entropy
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.fsdp.tensor_parallel import parallel_modules
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.task import StepModule
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.check import CHECKS, check_strategy
from drivetrain.testing.strategies.tasks import PADDING, Sequences, Tokens

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def split(world_size: int, **options: Any) -> FSDP:
    return FSDP(FSDPConfig(tensor_parallel=2, **options), world_size=world_size)


def test_tensor_parallel_steps_equal_those_of_one_process() -> None:
    conforms(split, "steps")


MAIN = ["frozen_and_tied", "evaluation_counts_each_sample_once", "resume_is_bitwise"]


@pytest.mark.landing
def test_tensor_parallel_resumes_bit_for_bit() -> None:
    check_strategy(split, checks=MAIN)


# On four processes the weights are split and sharded. A check of few runs shows that it is done right.
SHORT = ["frozen_and_tied", "evaluation_counts_each_sample_once", "checkpoints_have_plain_names"]


@pytest.mark.nightly
def test_tensor_parallel_conforms() -> None:
    check_strategy(split, checks=[name for name in CHECKS if name not in MAIN])
    check_strategy(split, 4, checks=[*SHORT, "resume_on_another_number_of_processes"])
    options = {"sharding": "hybrid", "shard_size": 1, "ignored": ("blocks.2*",)}
    for more in ({**options, "activation_checkpointing": "selective"}, {"wrap": (), "cpu_offload": True}):
        check_strategy(lambda world_size, more=more: split(world_size, **more), 4, checks=SHORT[:1])
    checks = ["same_as_the_big_batch", "resume_is_bitwise"]
    check_strategy(split, checks=checks, precision="bf16-true", tolerance=0.1)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.between = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        inputs = [each(y) for each in (self.query, self.key, self.value)]
        heads = [each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in inputs]
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

    def model_info(self) -> ModelInfo:
        return ModelInfo(parallel_plan=self.planned())

    def planned(self) -> Mapping[str, Any]:
        from torch.distributed.tensor import Replicate, Shard

        if self.plan is not None:
            return self.plan
        wide = [f"blocks.*.{name}" for name in ("query", "key", "value", "wide")]
        if not self.sequence:
            columns = {name: style("ColwiseParallel") for name in wide}
            return {**columns, "blocks.*.[on]*": style("RowwiseParallel")}
        whole: Any = {"input_layouts": Shard(1), "output_layouts": Shard(-1)}
        gathered: Any = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        return {
            "embedding": style("ColwiseParallel", output_layouts=Shard(1)),
            "blocks.*.be*": style("SequenceParallel", use_local_output=True),
            **{name: style("ColwiseParallel", **whole) for name in wide},
            "blocks.*.[on]*": style("RowwiseParallel", output_layouts=Shard(1)),
            "head": style("PrepareModuleInput", use_local_output=True, **gathered),
        }


class Measured(Transformer):  # by its logits, which no loss needs
    def training_step(self, batch: Any) -> Any:
        outputs = self.embedding(batch[0])
        return StepOutput(outputs.mean(), outputs)

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        return (self.head(outputs),)


def sentences(batch_size: int, count: int = 12) -> DataLoader[Any]:
    tokens = torch.randint(16, (count, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


def whole(task: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = task.state_dict()
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in state.items()}


def fitted(task: TaskModule, strategy: Strategy, data: Any, **options: Any) -> dict[str, Tensor]:
    quiet(strategy=strategy, devices=strategy.world_size, **{"max_epochs": 1, **options}).fit(task, data)
    return whole(task)


def differing(**options: Any) -> str:  # from one process, after an epoch
    strategy = split(torch.distributed.get_world_size())
    data = sentences(4 // strategy.data_size)
    counts = [Throughput(), Throughput()]
    both = (strategy, data), (SingleDevice("cpu"), sentences(4))
    runs = [(*each, {"max_grad_norm": 0.5, "callbacks": [n]}) for each, n in zip(both, counts, strict=True)]
    found, alone = (fitted(Transformer(**options), *given, **more) for *given, more in runs)
    # The operations of a split sample are those of a whole one, but for attention, of half of the heads here.
    of_rank, of_all = (torch.tensor(each.state_dict()["flops"]) for each in counts)
    heads = 2 * 4 * 6**2 * 8 / 2  # forward; backward has 2 times as many
    assert (of_all - of_rank).tolist() == 3 * heads
    close = {name: torch.allclose(found[name], alone[name], rtol=1e-5, atol=1e-6) for name in alone}
    return ", ".join(name for name in close if not close[name])


@pytest.mark.heavy("the plan of a whole transformer")
def test_transformer_is_split_by_heads_and_columns_and_over_the_sequence() -> None:
    # Dropout draws the same in all of a tensor group.
    assert on_two_ranks(lambda: [differing(sequence=True), differing(dropout=0.5)]) == [["", ""]] * 2


class Words(Transformer):
    """Its loss is over the parts of a split vocabulary, on sequences of different lengths."""

    def __init__(self, words: int = 16, tied: bool = False, sequence: bool = False) -> None:
        super().__init__(sequence=sequence)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.embedding, self.head = nn.Embedding(words, 8), nn.Linear(8, words, bias=not tied)
        self.norm, self.tied = nn.LayerNorm(8), tied
        if tied:
            self.head.weight = self.embedding.weight

    def training_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embedding(batch["tokens"][:, :-1].clamp_min(0))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.norm(x), self.head, batch["tokens"][:, 1:], ignore_index=PADDING)

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["tokens"][:, 1:] != PADDING).sum()

    def planned(self) -> Mapping[str, Any]:
        from torch.distributed.tensor import Replicate, Shard

        layouts: Any = {"output_layouts": Shard(1) if self.sequence else Replicate()}
        by_words = style("RowwiseParallel", input_layouts=Replicate(), **layouts)
        more = {"norm": style("SequenceParallel")} if self.sequence else {}
        return {**super().planned(), "embedding": by_words, "head": style("ColwiseParallel"), **more}


class Exchanged(TorchDispatchMode):
    """What goes between ranks: the names of the operations, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.bytes = 0

    def in_steps(self) -> list[Any]:
        enter, leave = lambda _: self.__enter__(), lambda _: self.__exit__(None, None, None)
        return [LambdaCallback(on_step_start=enter, on_step_end=leave)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.names.add(func.__name__)
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.bytes += sum(each.nbytes for each in tensors)
        return func(*args, **(kwargs or {}))


def words_differ(
    precision: str = "32", accumulation: int = 1, count: int = 22, callbacks: Any = (), **options: Any
) -> float:
    strategy, samples = split(torch.distributed.get_world_size()), Sequences(count)
    data = DataLoader(samples, batch_size=4 // strategy.data_size // accumulation)
    more: dict[str, Any] = {"precision": precision, "max_grad_norm": 0.3}
    of_rank = {"gradient_accumulation_steps": accumulation, "callbacks": callbacks}
    found = fitted(Words(**options), strategy, data, **of_rank, **more)
    alone = fitted(Words(**options), SingleDevice("cpu"), DataLoader(samples, batch_size=4), **more)
    return max((found[name] - alone[name]).abs().max().item() for name in alone)


@pytest.mark.heavy("three fits")
def test_loss_over_a_split_vocabulary_gathers_neither_logits_nor_the_head() -> None:
    def on_rank() -> Any:
        few, many = Exchanged(), Exchanged()
        difference = words_differ(tied=True, count=8, callbacks=few.in_steps())
        data = DataLoader(Sequences(8), batch_size=4)
        more: dict[str, Any] = {"max_grad_norm": 0.3, "callbacks": many.in_steps()}
        fitted(Words(64, tied=True), split(2, gather_at_end=False), data, **more)
        return difference, few.bytes, many.bytes, few.names | many.names

    for difference, few, many, names in on_two_ranks(on_rank):
        assert difference < 1e-6
        assert few == many > 0  # so nothing that is exchanged has a row for each word
        assert not any("gather" in each for each in names)


@pytest.mark.nightly
def test_loss_over_a_split_vocabulary_is_that_of_one_process_on_four_processes() -> None:
    def on_rank() -> list[float]:
        options: tuple[dict[str, Any], ...] = (
            {"tied": True}, {"accumulation": 2}, {"sequence": True}, {"tied": True, "sequence": True}
        )  # fmt: skip
        return [words_differ(**each) for each in options] + [words_differ("bf16-mixed")]

    for found in run_distributed(on_rank, world_size=4):
        assert max(found[:-1]) < 1e-6
        assert found[-1] < 0.05


def held() -> tuple[list[int], list[int]]:
    shapes: list[list[int]] = []

    def look(run: Any) -> None:
        weights = run.task.blocks[0].wide.weight, run.task.embedding.weight
        shapes.extend(list(each.to_local().shape) for each in weights)

    callbacks = [LambdaCallback(on_step_end=look)]
    fitted(Transformer(), split(4), sentences(2), max_steps=1, max_epochs=None, callbacks=callbacks)
    return shapes[0], shapes[1]


@pytest.mark.landing
def test_tensor_parallel_is_split_and_sharded_on_four_processes() -> None:
    def found() -> Any:
        return [differing(), differing(sequence=True)], held()

    # Of 16 x 8 a quarter, and of what no plan names a half, in both processes of a tensor group.
    expected = (["", ""], ([4, 8], [8, 8]))
    assert run_distributed(found, world_size=4) == [expected] * 4


def style(name: str, **options: Any) -> Any:
    import torch.distributed.tensor.parallel as parallel

    return getattr(parallel, name)(**options)


def test_plan_refusals() -> None:
    def plan(plan: Any) -> Any:
        return lambda: parallel_modules(Transformer(plan=plan))

    columns = style("ColwiseParallel")
    cases: dict[str, Any] = {
        "none": (plan({}), "define Transformer.model_info()"),
        "style": (plan({"head": "columns"}), "has a str for 'head'"),
        "name": (plan({"heads": columns}), "not a module of the task", "Did you mean 'head'"),
    }
    assert_refused(ConfigError, cases)
    task = Transformer(plan={"blocks.*.w*": columns})  # a star stays within the dots
    assert [each.name for each in parallel_modules(task)] == ["blocks.0.wide", "blocks.1.wide"]

    def of(task: TaskModule, **options: Any) -> Any:
        return lambda: split(2, **options).prepare(StepModule(task), lambda _: {}, as_precision("32"))

    tied = Transformer(plan={"embedding": columns, "head": columns})
    tied.head.weight = tied.embedding.weight  # whose two uses are split in different dimensions
    uneven = Transformer(plan={"head": columns})
    uneven.head = nn.Linear(8, 5)
    adapted = Transformer(plan={"head": columns})

    def step_of(kind: type[Transformer]) -> None:  # each rank has half of the logits
        model: Any = of(task := kind(plan={"head": columns}))().model
        model.use(task.training_step)
        model((torch.zeros(2, 6, dtype=torch.int64),))

    def backward_of_norms() -> None:  # each rank's norms have half of the sequence
        whole = Transformer(sequence=True).planned()
        task = Transformer(plan={name: each for name, each in whole.items() if ".be" not in name})
        strategy = split(2)
        model: Any = strategy.prepare(StepModule(task), lambda _: {}, as_precision("32")).model
        model.use(task.training_step)
        strategy.backward(model((torch.arange(12).view(2, 6),)))

    def on_rank() -> None:
        nn.utils.parametrizations.weight_norm(adapted.head)
        cases: dict[str, Any] = {
            "module": (of(Transformer(plan={"blocks.0": columns})), "'blocks.0' (Block): Colwise"),
            "ignored": (of(Tokens(), ignored=("head",)), "'head.weight' is both in FSDPConfig(ignored"),
            "tied": (of(tied), "one parameter", "different ways"),
            "adapted": (of(adapted), "'head' (ParametrizedLinear) has parameters in submodules"),
            "parts": (partial(step_of, Transformer), "values of shape []", "output_layouts=Replicate()"),
            "metrics": (partial(step_of, Measured), "of shape [2, 6, 8]", "or from metric_inputs"),
            "norms": (backward_of_norms, "different gradients of 'blocks.1.between."),
            "uneven": (of(uneven), "=2 does not divide dimension 0 of 'head.weight'", "[5, 8]"),
        }
        assert_refused((ConfigError, StrategyError), cases)

    on_two_ranks(on_rank)
