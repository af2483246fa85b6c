"""Sequences divided over processes: the numbers of one process."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import (
    FSDPConfig,
    LambdaCallback,
    OptimizerConfig,
    StepOutput,
    StrategyError,
    TaskModule,
    Term,
    Throughput,
)
from drivetrain.core.errors import DrivetrainError
from drivetrain.data import packed
from drivetrain.run.setting_checks import check_outputs
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.fsdp.context_parallel import ContextParallel, context_group
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.task import StepModule
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.job import whole_state

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
COLUMNS = ("input_ids", "targets", "position_ids")


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.attention = Attention()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        made = [each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        turn = torch.polar(torch.ones(()), positions[:, None, :, None] / torch.tensor([1.0, 7.0]))
        pairs = (torch.view_as_complex(each.unflatten(-1, (2, 2))) for each in made[:2])
        query, key = (torch.view_as_real(each * turn).flatten(-2) for each in pairs)  # rotary positions
        mixed: Tensor = self.attention(query, key, made[2], mask)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Writer(TaskModule):
    def __init__(self, dropout: float = 0.0, **info: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embedding = nn.Embedding(16, 16)
            self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
            self.head = nn.Linear(16, 16, bias=False)
            self.head.weight = self.embedding.weight
        self.drawn: list[Tensor] = []
        twice = ("blocks.*.attention", "blocks.0.attention")  # one module by two patterns
        self.info = {"sequence_columns": COLUMNS, "attention_modules": twice, **info}

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.drawn += [torch.rand(())] if self.training else []
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, position_ids, attention_mask)
        return self.head(x)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
        kept = batch["targets"] != -100
        each = F.cross_entropy(outputs.mT, batch["targets"].clamp(min=0), reduction="none") * kept
        right = (outputs.argmax(-1) == batch["targets"]) & kept
        return {"loss": each.sum() / kept.sum(), "accuracy": right.sum() / kept.sum()}  # 0 / 0 in some parts

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["targets"] != -100).sum()

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        return int(self.loss_weight(batch))

    def configure_optimizers(self) -> dict[str, OptimizerConfig]:
        momentum = OptimizerConfig("sgd", lr=0.1, momentum=0.9, parameters="blocks.*")
        return {"blocks": momentum, "others": OptimizerConfig("sgd", lr=0.2, parameters="embedding.*")}

    def model_info(self) -> ModelInfo:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "wide")}
        plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "narrow")}
        return ModelInfo(parallel_plan=plan, **self.info)


class Rows(Dataset[Any]):
    """Packed documents with the label after each token. In some rows only the last quarter has labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(2, 9, (72,), generator=generator).tolist()
        documents = [torch.randint(16, (length,), generator=generator) for length in lengths]
        self.rows = packed(documents, 12, boundary="mask")

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        row = dict(self.rows[index])
        row["targets"] = F.pad(row.pop("labels")[1:], (0, 1), value=-100)
        row["targets"][: (0, 6, 9)[index % 3]] = -100
        return row


def batches(size: int) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=size, shuffle=True)


def of_context(**options: Any) -> FSDP:
    config = FSDPConfig(**{"context_parallel": 2, **options})
    return FSDP(config, world_size=torch.distributed.get_world_size())


def fitted(
    strategy: Any, size: int, task: Any = None, resume: Any = None, **options: Any
) -> dict[str, Tensor]:
    norms: list[float] = []
    note = LambdaCallback(on_step_end=lambda run: norms.append(float(run.result.grad_norm)))
    count = Throughput()
    given = {"max_epochs": 1, "max_grad_norm": 0.3, "callbacks": [note, count], **options}
    trainer = quiet(strategy=strategy, devices=strategy.world_size, **given)
    result = trainer.fit(task := task or Writer(), batches(size), batches(6), resume=resume)
    counts = {"samples": result.progress.samples, "tokens": result.progress.tokens, "norms": norms}
    means = {name: each for name, each in result.metrics.items() if not name.startswith("throughput")}
    found = means | counts | {"flops": count.state_dict()["flops"]}
    return whole_state(task) | {name: torch.tensor(each) for name, each in found.items()}


def differing(accumulation: int = 1, **options: Any) -> list[str]:  # from one process, in values of an epoch
    strategy = of_context(**options)
    size = 4 // strategy.data_size // accumulation
    found = fitted(strategy, size, gradient_accumulation_steps=accumulation)
    alone = fitted(SingleDevice("cpu"), 4)
    if strategy.config.tensor_parallel > 1:  # attention over a part of the heads counts only these
        del alone["flops"]
    return [name for name in alone if not torch.allclose(found[name], alone[name], rtol=1e-6, atol=1e-6)]


def test_context_parallel_equals_one_process() -> None:
    assert on_two_ranks(lambda: differing(4, activation_checkpointing=True)) == [[], []]


@pytest.mark.nightly
def test_plan_counts_one_part_of_a_sequence() -> None:
    parts, whole = (
        quiet(strategy=FSDPConfig(context_parallel=n), devices=2, max_epochs=1).plan(Writer(), batches(2))
        for n in (2, 1)
    )
    assert 0.5 < parts.memory["activations"] / whole.memory["activations"] < 0.7  # masks are whole
    # Query, key, value and the result, in each layer's forward and backward.
    assert [each.kind for each in parts.collectives].count("all_to_all") == 2 * 4 * 2


@pytest.mark.nightly
def test_context_parallel_is_sharded_and_split_on_four_processes() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"tensor_parallel": 2},
        {"context_parallel": 4, "accumulation": 2, "reduce_each_micro_batch": True},
        {"sharding": "hybrid", "shard_size": 2, "activation_checkpointing": "selective"},
        {"sharding": "shard_grad_op", "ignored": ("blocks.0.norm*",), "cpu_offload": True},
    ]
    found = run_distributed(lambda: [differing(**each) for each in options], world_size=4)
    assert found == [[[]] * len(options)] * 4


def unequal(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6
) -> list[str]:
    """Return the names of the values that differ, without those of the steps before a resume."""
    names = [name for name in expected if name not in ("norms", "flops")]
    return [n for n in names if not torch.allclose(found[n], expected[n], rtol=tolerance, atol=tolerance)]


def begun_and_resumed(folder: str) -> tuple[list[str], list[float]]:
    """Return what differs from an uninterrupted run, and the numbers that this rank drew in that."""
    task = Writer(dropout=0.5)
    whole = fitted(of_context(), 4, task)
    files = {"run_dir": folder, "checkpoint": True}
    fitted(of_context(), 4, Writer(dropout=0.5), max_steps=3, max_epochs=None, **files)
    return unequal(fitted(of_context(), 4, Writer(dropout=0.5), "auto", **files), whole, 0), [
        *map(float, task.drawn)
    ]


@pytest.mark.nightly
def test_context_parallel_resumes_bit_for_bit_and_on_other_numbers_of_processes(tmp_path: Path) -> None:
    (same, first), (also, second) = run_distributed(begun_and_resumed, str(tmp_path / "bits"), world_size=2)
    assert same == also == []
    assert not set(first) & set(second)  # the parts of a sequence draw different numbers
    files: Any = {"run_dir": str(tmp_path / "sizes"), "checkpoint": True}

    def begin() -> None:
        fitted(of_context(tensor_parallel=2), 4, max_steps=3, max_epochs=None, **files)

    run_distributed(begin, world_size=4)
    copied = shutil.copytree(tmp_path / "sizes", tmp_path / "alone")
    found = run_distributed(lambda: fitted(of_context(), 4, None, "auto", **files), world_size=2)[0]
    alone = fitted(SingleDevice("cpu"), 4, None, "auto", **{**files, "run_dir": str(copied)})
    assert unequal(found, alone) == unequal(found, fitted(SingleDevice("cpu"), 4)) == []


def test_values_in_float16_are_joined_by_weights_beyond_its_range() -> None:
    class Heavy(Writer):
        def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
            return 50_000 * super().loss_weight(batch)

    def joined() -> float:
        group, module = context_group(2, 2, 1), StepModule(Heavy())
        ContextParallel(module, group)
        module.use(lambda batch: torch.tensor(2.5, dtype=torch.float16))
        value = float(module({name: each[None] for name, each in Rows()[0].items()}))
        torch.distributed.destroy_process_group(group)
        return value

    assert on_two_ranks(joined) == [2.5, 2.5]


def test_context_parallel_refusals() -> None:
    def of(**options: Any) -> Any:
        return lambda: FSDP(FSDPConfig(context_parallel=2, **options), world_size=3)

    def on_rank() -> None:
        group = context_group(2, 2, 1)
        row = {name: each[None] for name, each in Rows()[0].items()}

        class Shifts(Writer):
            def loss_weight(self, batch: Any) -> Any:
                return (batch["targets"][:, 1:] != -100).sum()

        class Unsplit(Writer):
            def loss_weight(self, batch: Any) -> Any:
                return batch["attention_mask"].sum()

        class Penalized(Writer):  # by a gradient
            def loss(self, outputs: Any, batch: Any) -> Any:
                slope = torch.autograd.grad(outputs.sum(), self.embedding.weight, create_graph=True)
                slope[0].sum().backward()

        class Steps(Writer):
            def training_step(self, batch: Any) -> Any:
                yield "blocks", self(**batch)

        def step(batch: Any = row, change: Any = None, run: Any = None, of: Any = Writer, **info: Any) -> Any:
            def made() -> None:
                task = of(**info)
                if change is not None:
                    change(task)
                module = StepModule(task)
                ContextParallel(module, group)
                module.use(run or task.training_step)
                module(*batch) if isinstance(batch, tuple) else module(batch)

            return made

        def flat(task: Any) -> None:
            task.blocks[1].attention.forward = lambda q, k, v, mask: v.flatten(2)

        def summed(task: Any) -> None:
            task._modules["loss"] = nn.MSELoss(reduction="sum")

        def wide(task: Any) -> None:
            for each in (task.blocks[0].query, task.blocks[0].key, task.blocks[0].value):
                each.weight = nn.Parameter(torch.ones(12, 16))

        def longer(task: Any) -> None:
            given = [torch.ones(1, 2, 7, 4)] * 3  # such as a part with a token before it
            task.blocks[0].register_forward_pre_hook(lambda block, _: block.attention(*given))

        def by_keyword(task: Any) -> None:
            task.blocks[0].register_forward_pre_hook(lambda block, _: block.attention(mask=None))

        odd = {**row, "targets": row["targets"][:, :11]}
        term = {"loss": torch.zeros(()), "balance": Term(torch.zeros(()), weight=1)}
        shown = StepOutput(term["loss"], media={"picture": 1})
        cases: dict[str, Any] = {
            "nothing": (step(sequence_columns=()), "define Writer.model_info()", "attention_modules"),
            "text": (step(sequence_columns="targets"), "sequence_columns=('tokens', ...)"),
            "task": (step(of=nn.Identity), "needs a TaskModule", "Identity does not"),
            "sum": (step(change=summed), "Writer.loss is a sum", "reduction='mean'"),
            "module": (step(attention_modules=("blocks.*.attn",)), "names 'blocks.*.attn'", "not a module"),
            "batch": (step([row]), "columns of a mapping", "a list"),
            "own loop": (step((row, row)), "a tuple", "call the model with the batch alone"),
            "column": (step(sequence_columns=("labels",)), "'labels'", "The batch has 'input_ids'"),
            "length": (step(odd), "=2 does not divide the 11 positions of 'targets'", "here 12"),
            "heads": (step(change=wide), "the heads of 'blocks.0.attention'", "[1, 3, 6, 4]"),
            "keywords": (step(change=by_keyword), "its first three arguments", "not NoneType"),
            "positions": (step(change=longer), "'blocks.0.attention'", "here they have 7", "this process 6"),
            "output": (step(change=flat), "'blocks.1.attention' must return", "[1, 2, 48]"),
            "shifted": (step(of=Shifts), "Shift labels where batches are made"),
            "unsplit": (step(of=Unsplit), "reads no column that is split", "Sum over the positions"),
            "outputs": (step(run=lambda batch: batch["targets"]), "part of a sequence", "shape (1, 6)"),
            "term": (step(run=lambda batch: term), "not terms or media: balance"),
            "media": (step(run=lambda batch: shown), "not terms or media: picture"),
            "generator": (step(of=Steps), "whose training_step returns a loss, which Steps does not"),
            "penalty": (step(of=Penalized), "differentiate twice"),
        }
        assert_refused((DrivetrainError, RuntimeError), cases)
        torch.distributed.destroy_process_group(group)

    on_two_ranks(on_rank)
    two = FSDP(FSDPConfig(context_parallel=2), world_size=2)
    cases: dict[str, Any] = {
        "ranks": (of(), "context_parallel=2 does not divide 3 processes"),
        "both": (of(tensor_parallel=2), "tensor_parallel=2 times context_parallel=2 does not"),
        "metrics": (lambda: check_outputs(two, "metrics()"), "metrics() with strategy 'fsdp'", "part of a"),
    }
    assert_refused(StrategyError, cases)
