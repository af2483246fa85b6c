"""A loop of one's own on several processes: the numbers of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, Engine, StrategyError
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def loop(kind: Any, world_size: int, batch_size: int, accumulate: int = 1) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 1)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(17, 3, generator=generator)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
    engine = Engine(kind(world_size=world_size) if kind else "cpu", devices=world_size if kind else 1)
    model, optimizer = engine.prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
    norms = []
    for _ in range(2):
        for number, (features, target) in enumerate(engine.prepare_data(loader)):
            engine.backward(F.mse_loss(model(features), target))
            if (number + 1) % accumulate == 0:
                norms.append(float(engine.step(optimizer, max_grad_norm=1.0).grad_norm))  # type: ignore[arg-type]
    parameters = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    counted = engine.progress.samples
    engine.teardown()
    return [each.tolist() for each in parameters], norms, counted


@pytest.mark.parametrize("kind", [DDP, FSDP])
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_sample_counts_once_in_a_short_last_round(kind: Any, world_size: int) -> None:
    # 17 samples: a last round of one sample, which all processes but one have no part of.
    alone = loop(None, 1, 4)
    for found in run_distributed(loop, kind, world_size, 4 // world_size, world_size=world_size):
        for mine, theirs in zip((*found[0], found[1]), (*alone[0], alone[1]), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-6, atol=1e-6)
        assert found[2] == alone[2] == 34


def prepared(kind: Any, what: str) -> str:
    """What both ranks are told when rank 1 prepares something else."""
    rank = torch.distributed.get_rank()
    model: Any = nn.Linear(3, 2 if what == "shape" and rank else 1)
    rate = 0.2 if what == "rate" and rank else 0.1
    engine = Engine(kind(world_size=2), devices=2)
    try:
        engine.prepare(model, lambda params: torch.optim.SGD(params, lr=rate))
    except (ConfigError, StrategyError) as error:
        return str(error)
    finally:
        engine.teardown()
    return "nothing"


@pytest.mark.parametrize("kind", [DDP, FSDP])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("same", "nothing"),
        ("rate", "lr of group 0 of the optimizer is 0.1 on rank 0 and 0.2 on rank 1. Let the factory give"),
        ("shape", "'weight' is float32[1, 3] on rank 0 and float32[2, 3] on rank 1"),
    ],
)
def test_ranks_that_prepare_different_things_are_told(kind: Any, what: str, told: str) -> None:
    assert all(told in each for each in run_distributed(prepared, kind, what))


def weightless(kind: Any, mean: str) -> Any:
    """Rank 1 has nothing but padding in the first of two updates; whether the weights are finite then."""
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    engine = Engine(kind(world_size=2), devices=2)
    model, optimizer = engine.prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
    target = torch.tensor([0, 1])
    try:
        for update in range(2):
            labels = torch.full((2,), -100) if engine.ranks.rank == 1 and update == 0 else target
            scores = model(torch.ones(2, 3))
            counted = int((labels >= 0).sum())
            if mean == "torch":
                loss = F.cross_entropy(scores, labels)
            else:
                loss = (scores.square().sum(1) * (labels >= 0)).sum() / counted
            engine.backward(loss, counted)
            engine.step(optimizer)
    finally:
        engine.teardown()
    return [
        bool(each.isfinite().all()) for each in (getattr(p, "_local_tensor", p) for p in model.parameters())
    ]


@pytest.mark.parametrize("kind", [DDP, FSDP])
@pytest.mark.parametrize("mean", ["torch", "by hand"])
def test_a_mean_over_nothing_counts_nothing(kind: Any, mean: str) -> None:
    assert run_distributed(weightless, kind, mean) == [[True, True]] * 2


def running_means(kind: Any, evaluate: bool) -> Any:
    """What batch norm has counted after two updates, then perhaps after an evaluation, on this rank."""
    torch.manual_seed(0)
    norm: Any = nn.BatchNorm1d(3)
    engine = Engine(kind(world_size=2), devices=2)
    model, optimizer = engine.prepare(norm, lambda params: torch.optim.SGD(params, lr=0.1))
    for update in range(2):
        engine.backward(model(torch.randn(4, 3) + engine.ranks.rank + update).square().mean())
        engine.step(optimizer)
    if evaluate:
        model.eval()
        for _ in range(2):
            model(torch.ones(2, 3))
    engine.teardown()
    return norm.running_mean.tolist()


@pytest.mark.parametrize("evaluate", [False, True])
def test_buffers_are_rank_0s_before_each_forward_in_every_strategy(evaluate: bool) -> None:
    ddp, fsdp = (run_distributed(running_means, kind, evaluate) for kind in (DDP, FSDP))
    assert ddp == fsdp
    assert (ddp[0] == ddp[1]) is evaluate


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.line(x)
        return made


def saved_or_loaded(kind: Any, path: str, save: bool) -> Any:
    """The names of the model's state, and its weights after an update that was saved, or as loaded."""
    torch.manual_seed(0 if save else 1)
    world_size = torch.distributed.get_world_size() if kind else 1
    engine = Engine(kind(world_size=world_size) if kind else "cpu", devices=world_size)
    model, optimizer = engine.prepare(Named(), lambda params: torch.optim.AdamW(params, lr=0.1))
    if save:
        engine.backward(model(torch.ones(2, 4)).square().mean())
        engine.step(optimizer)
        engine.save(path, model=model, optimizer=optimizer)
    else:
        engine.load(path, model=model, optimizer=optimizer)
    state = model.state_dict()
    model.load_state_dict(state)
    whole = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).tolist()
        for name, each in state.items()
    }
    engine.teardown()
    return whole


def test_what_one_strategy_saves_in_a_loop_of_ones_own_all_others_load(tmp_path: Any) -> None:
    kinds = [None, DDP, FSDP]
    for first in kinds:
        path = str(tmp_path / str(first))
        processes = 2 if first else 1
        saved = run_distributed(saved_or_loaded, first, path, True, world_size=processes)[0]
        assert sorted(saved) == ["line.bias", "line.weight"]
        for second in kinds:
            processes = 2 if second else 1
            for loaded in run_distributed(saved_or_loaded, second, path, False, world_size=processes):
                assert loaded == saved
