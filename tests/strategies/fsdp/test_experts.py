"""Experts over ranks: the numbers, checkpoints and states of one process."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.fsdp.test_context_parallel import Rows, Writer
from tests.strategies.fsdp.test_tensor_parallel import style, whole
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, ConfigError, FSDPConfig, StrategyError, TaskModule, WeightAverage
from drivetrain.strategies import ExpertParallel, SingleDevice
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.task import StepModule
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.tasks import PADDING, VOCABULARY, Sequences

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Experts(nn.Module):
    def __init__(self, experts: int, width: int = 8) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(experts, 16, width) / 4)
        self.narrow = nn.Parameter(torch.randn(experts, width, 16) / 4)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        parts = zip(tokens.split(counts.tolist()), self.wide, self.narrow, strict=True)
        made = [F.linear(F.linear(x, wide).relu(), narrow) for x, wide, narrow in parts if len(x)]
        return torch.cat([tokens.new_empty(0, tokens.shape[1]), *made])


class Grouped(Experts):
    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()
        return F.grouped_mm(F.grouped_mm(tokens, self.wide.mT, offs=ends).relu(), self.narrow.mT, offs=ends)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, number: int, width: int = 8, used: int | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.used = nn.Linear(width, number, bias=False), experts, used

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares, numbers = self.router(tokens)[:, : self.used].softmax(-1).topk(2, dim=-1)
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=self.router.out_features)
        made = self.experts(tokens[order // 2], counts) * shares.flatten()[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order // 2, made.to(x.dtype)).view_as(x)


class Sparse(TaskModule):
    def __init__(self, kind: Any = Experts, number: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embedding = nn.Embedding(VOCABULARY, 8)
            # The second layer uses half of the experts, so some of the ranks have no tokens there.
            self.layers = nn.Sequential(*(Layer(kind(number), number, used=each) for each in (None, 2)))
            self.head = nn.Linear(8, VOCABULARY)

    def training_step(self, batch: Any) -> Tensor:
        outputs = self.head(self.layers(self.embedding(batch["tokens"][:, :-1].clamp_min(0))))
        targets = batch["tokens"][:, 1:].flatten()
        return F.cross_entropy(outputs.flatten(0, 1).float(), targets, ignore_index=PADDING)

    validation_step = training_step

    def loss_weight(self, batch: Any) -> Tensor:
        return (batch["tokens"][:, 1:] != PADDING).sum()

    def model_info(self) -> ModelInfo:
        from torch.distributed.tensor import Replicate

        router = style("ColwiseParallel", output_layouts=Replicate())
        return ModelInfo(parallel_plan={"layers.*.router": router, "layers.*.experts": ExpertParallel()})


def fitted(
    alone: bool, samples: Any, task: Any, accumulation: int = 1, resume: Any = None, **given: Any
) -> tuple[dict[str, Tensor], float]:
    """Return the weights, and the loss of an evaluation."""
    config = {each.name: given.pop(each.name) for each in fields(FSDPConfig) if each.name in given}
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = FSDP(FSDPConfig(expert_parallel=True, **config), world_size=world_size)
    used = SingleDevice("cpu") if alone else strategy
    data = DataLoader(samples, batch_size=4 if alone else 4 // strategy.data_size // accumulation)
    more = {"max_epochs": 1, "gradient_accumulation_steps": 1 if alone else accumulation, **given}
    trainer = quiet(strategy=used, devices=used.world_size, max_grad_norm=0.3, **more)
    result = trainer.fit(task, data, DataLoader(samples, batch_size=3), resume=resume)
    return whole(task), result.metrics["validation/loss"]


def differing(samples: Any = None, make: Any = Sparse, **options: Any) -> tuple[float, float]:
    samples = samples or Sequences()  # one has no weight: by itself, a rank runs a placeholder
    found, measured = fitted(False, samples, make(), **options)
    alone, expected = fitted(True, samples, make(), precision=options.get("precision", "32"))
    return max((found[name] - alone[name]).abs().max().item() for name in alone), abs(measured - expected)


def test_experts_over_ranks_train_as_those_of_one_process() -> None:
    for found in on_two_ranks(lambda: differing(Sequences(8), accumulation=2)):
        assert max(found) < 1e-6


class Writes(Writer):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            for block in self.blocks:
                block.wide, block.narrow = Layer(Experts(4, 16), 4, 16), nn.Linear(16, 16)

    def model_info(self) -> ModelInfo:
        return ModelInfo(parallel_plan={"blocks.*.wide.experts": ExpertParallel()}, **self.info)


@pytest.mark.nightly
def test_experts_over_ranks_with_every_option() -> None:
    two: list[dict[str, Any]] = [
        {}, {"activation_checkpointing": True}, {"cpu_offload": True}, {"make": lambda: Sparse(Grouped)},
        {"sharding": "shard_grad_op"}, {"make": Writes, "samples": Rows(), "context_parallel": 2},
    ]  # fmt: skip
    four = [{"sharding": "hybrid", "shard_size": 2}, {"tensor_parallel": 2}]
    for ranks, cases in ((2, two), (4, four)):
        for options in cases:
            for found in run_distributed(lambda options=options: differing(**options), world_size=ranks):
                assert max(found) < 1e-6, options
    for _, loss in run_distributed(lambda: differing(precision="bf16-mixed"), world_size=2):
        assert loss < 1e-3


def steps(many: int, directory: Path, resume: Any = None, alone: bool = False) -> dict[str, Tensor]:
    more = {"run_dir": directory, "checkpoint": CheckpointConfig(every="2 steps"), "max_epochs": None}
    more["callbacks"] = [WeightAverage(decay=0.9)]
    return fitted(alone, Sequences(), Sparse(), resume=resume, max_steps=many, **more)[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 4), (2, 1), (1, 2)])
def test_experts_resume_on_another_number_of_ranks(first: int, second: int, tmp_path: Path) -> None:
    expected = run_distributed(steps, 4, tmp_path / "whole", world_size=2)[0]
    run_distributed(steps, 2, tmp_path / "parts", None, first == 1, world_size=first)
    found = run_distributed(steps, 4, tmp_path / "parts", "auto", second == 1, world_size=second)[0]
    exact = first == second
    for name, each in expected.items():
        assert torch.equal(found[name], each) if exact else torch.allclose(found[name], each, atol=1e-6)


def test_refusals_of_experts() -> None:
    class Bare(Sparse):
        def model_info(self) -> ModelInfo:
            return ModelInfo(parallel_plan={"head": style("ColwiseParallel")})

    def config(**options: Any) -> Any:
        return lambda: FSDPConfig(expert_parallel=True, **options)

    assert_refused(
        ConfigError,
        {
            "sharding": (config(sharding="no_shard"), "expert_parallel", "no_shard"),
            "recomputation": (config(activation_checkpointing="selective"), "use 'full'"),
        },
    )

    def of(task: TaskModule, again: Any = False) -> Any:
        strategy = FSDP(FSDPConfig(expert_parallel=True, activation_checkpointing=again), world_size=2)
        return lambda: strategy.prepare(StepModule(task), lambda _: {}, as_precision("32"))

    def with_buffer(number: int) -> nn.Module:
        experts = Experts(number)
        experts.register_buffer("scale", torch.ones(number))
        return experts

    def on_rank() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        right = ExpertParallel()._apply(Experts(4), init_device_mesh("cpu", (2,)))
        linear, tied = Sparse(lambda number: nn.Sequential(nn.Linear(8, number))), Sparse()
        tied.layers[1].experts.wide = tied.layers[0].experts.wide
        cases: dict[str, Any] = {
            "uneven": (of(Sparse(number=3)), "'layers.0.experts' (Experts)", "2 processes", "3 experts"),
            "submodules": (of(linear), "none in submodules", "0.weight"),
            "buffers": (of(Sparse(with_buffer)), "no buffers", "and the buffers ['scale']"),
            "counts": (lambda: right(torch.ones(8, 8), torch.full((4,), 3)), "up to 12, for 8 tokens"),
            "tied": (of(tied), "'layers.0.experts.wide' and 'layers.1.experts.wide' are one parameter"),
            "no experts": (of(Bare()), "no ExpertParallel()"),
            "recomputed": (of(Sparse(), ("Experts",)), "('Experts',) names a module of experts"),
        }
        assert_refused((ConfigError, StrategyError), cases)

    on_two_ranks(on_rank)
