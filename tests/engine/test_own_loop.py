"""Your own loop over any module (`Engine.prepare`, `backward`, `step`): weights, precision, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import NextToken, Regression, pairs, quiet, ragged
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, Engine, OptimizerConfig, StrategyError
from drivetrain.testing import run_distributed


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def own_loop(engine: Engine, data: Any, micro_batches: int = 1) -> nn.Module:
    """The documented loop over an `nn.Module`, with token weights and accumulation."""
    task = NextToken(OptimizerConfig("sgd"))
    model, optimizer = engine.prepare(task, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    waiting = 0
    for batch in engine.prepare_data(data):
        engine.backward(task.loss(model(batch["tokens"]), batch), weight=task.loss_weight(batch))
        waiting += 1
        if waiting == micro_batches:
            engine.step(optimizer, max_grad_norm=1.0)
            waiting = 0
    if waiting:
        engine.step(optimizer, max_grad_norm=1.0)
    return task


def test_accumulated_backwards_equal_the_big_batch() -> None:
    """With a short last window, and a sequence that is padding alone."""
    states = [
        own_loop(Engine("cpu", "64"), DataLoader(ragged(), batch_size=size), micro_batches).state_dict()
        for size, micro_batches in ((8, 1), (4, 2), (1, 8))
    ]
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.allclose(state[name], value, rtol=1e-12, atol=0), name


def test_your_own_loop_equals_the_trainers() -> None:
    data = DataLoader(ragged(), batch_size=4)
    task = NextToken(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    quiet(max_epochs=1, max_grad_norm=1.0).fit(task, data)
    assert weights(own_loop(Engine("cpu"), data)) == weights(task)
    for batches in (pairs(), list(pairs())):  # with dropout, over a loader and over batches in memory
        task = Regression(sgd, dropout=0.5)
        quiet(max_epochs=1, seed=4).fit(task, batches)
        engine = Engine("cpu", seed=4)
        model, optimizer = engine.prepare(Regression(dropout=0.5), sgd)
        for features, target in engine.prepare_data(batches):
            engine.backward(F.mse_loss(model(features), target))
            engine.step(optimizer)
        assert weights(model.task) == weights(task)


def test_the_micro_batches_of_a_window_draw_differently() -> None:
    draws = [torch.rand(()).item() for _ in Engine("cpu").prepare_data(pairs())]
    assert len(set(draws)) == len(draws) == 5


def test_a_backward_of_weight_zero_contributes_nothing() -> None:
    engine = Engine("cpu")
    (model, optimizer), (other, right) = (engine.prepare(Regression(), sgd) for _ in range(2))
    before = weights(model)
    features, target = next(iter(pairs()))
    engine.backward(model(features).mean() * float("nan"), weight=0)
    engine.step(optimizer, max_grad_norm=1.0)  # a window of weight zero changes nothing
    assert weights(model) == before
    engine.backward(model(features).mean() * float("nan"), weight=0)
    engine.backward(F.mse_loss(model(features), target), weight=3)
    engine.step(optimizer)
    engine.backward(F.mse_loss(other(features), target))
    engine.step(right)
    assert weights(model) == weights(other)


def test_refusals_in_your_own_loop_and_its_precision() -> None:
    engine = Engine("cpu", "bf16-mixed")
    model, optimizer = engine.prepare(Regression(), sgd)
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    loss = torch.ones((), requires_grad=True)
    cases: dict[str, tuple[Any, ...]] = {
        "step without a backward": (lambda: engine.step(optimizer), "without engine.backward"),
        "negative weight": (lambda: engine.backward(loss, weight=-1), "weight"),
        "weight of NaN": (lambda: engine.backward(loss, weight=float("nan")), "weight"),
    }
    assert_refused(ConfigError, cases)


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in module.state_dict().items()
    }


def loop(strategy: str, world_size: int, batch_size: int) -> Any:
    torch.manual_seed(0)
    x = torch.randn(17, 3, generator=torch.Generator().manual_seed(4))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
    engine = Engine(strategy, devices=world_size)
    model, optimizer = engine.prepare(nn.Linear(3, 1), sgd)
    norms = []
    for _ in range(2):
        for features, target in engine.prepare_data(loader):
            engine.backward(F.mse_loss(model(features), target))
            norms.append(float(engine.step(optimizer, max_grad_norm=1.0).grad_norm))
    state, counted = whole(model), engine.progress.samples
    engine.teardown()
    return [*state.values(), torch.tensor(norms)], counted


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_each_sample_counts_once_in_a_short_last_round(strategy: str, world_size: int) -> None:
    # 17 samples: a last round of one sample, which all ranks but one have no part of.
    alone, arguments = loop("cpu", 1, 4), (loop, strategy, world_size, 4 // world_size)
    results = on_two_ranks(*arguments) if world_size == 2 else run_distributed(*arguments, world_size=4)
    for found in results:
        torch.testing.assert_close(found[0], alone[0], rtol=1e-6, atol=1e-6)
        assert found[1] == alone[1] == 34


def prepared(strategy: str) -> list[str]:
    """What both ranks are told when rank 1 prepares the same, another rate, or another shape."""
    found, rank = [], torch.distributed.get_rank()
    for rate, size in ((0.1, 1), (0.2, 1), (0.1, 2)):
        engine = Engine(strategy, devices=2)
        try:
            model = nn.Linear(3, size if rank else 1)
            engine.prepare(model, lambda params, rate=rate: torch.optim.SGD(params, lr=rate if rank else 0.1))
            found.append("nothing")
        except (ConfigError, StrategyError) as error:
            found.append(str(error))
        finally:
            engine.teardown()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_prepare_different_things_are_refused(strategy: str) -> None:
    for same, rate, shape in on_two_ranks(prepared, strategy):
        assert same == "nothing"
        assert "lr of group 0 of the optimizer is 0.1 on rank 0 and 0.2 on rank 1" in rate
        assert "'weight' is float32[1, 3] on rank 0 and float32[2, 3] on rank 1" in shape


def weightless(strategy: str, by_torch: bool) -> bool:
    """Rank 1 has nothing but padding in the first of two updates; whether the weights are finite then."""
    torch.manual_seed(0)
    engine = Engine(strategy, devices=2)
    model, optimizer = engine.prepare(nn.Linear(3, 2), sgd)
    for update in range(2):
        padding = engine.ranks.rank == 1 and update == 0
        labels = torch.full((2,), -100) if padding else torch.tensor([0, 1])
        scores, counted = model(torch.ones(2, 3)), int((labels >= 0).sum())
        by_hand = (scores.square().sum(1) * (labels >= 0)).sum() / counted
        engine.backward(F.cross_entropy(scores, labels) if by_torch else by_hand, counted)
        engine.step(optimizer)
    finite = all(bool(each.isfinite().all()) for each in whole(model).values())
    engine.teardown()
    return finite


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_backward_of_a_mean_over_nothing_counts_nothing(strategy: str) -> None:
    for by_torch in (True, False):
        assert on_two_ranks(weightless, strategy, by_torch) == [True, True]


def running_means(strategy: str, evaluate: bool) -> list[float]:
    """What batch norm has counted after two updates, then perhaps after an evaluation, on this rank."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    engine = Engine(strategy, devices=2)
    model, optimizer = engine.prepare(norm, sgd)
    for update in range(2):
        engine.backward(model(torch.randn(4, 3) + engine.ranks.rank + update).square().mean())
        engine.step(optimizer)
    if evaluate:
        model.eval()
        for _ in range(2):
            model(torch.ones(2, 3))
    engine.teardown()
    return norm.running_mean.tolist()


def test_buffers_are_rank_0s_before_each_forward_in_every_strategy() -> None:
    for evaluate in (False, True):
        ddp, fsdp = (on_two_ranks(running_means, strategy, evaluate) for strategy in ("ddp", "fsdp"))
        assert ddp == fsdp
        assert (ddp[0] == ddp[1]) is evaluate


def saved_or_loaded(strategy: str, path: str, save: bool) -> dict[str, list[float]]:
    """The weights after an update that was saved, or as loaded."""
    torch.manual_seed(0 if save else 1)
    engine = Engine(strategy, devices=1 if strategy == "cpu" else 2)
    model, optimizer = engine.prepare(
        nn.Sequential(nn.Linear(4, 2)), lambda params: torch.optim.AdamW(params, lr=0.1)
    )
    if save:
        engine.backward(model(torch.ones(2, 4)).square().mean())
        engine.step(optimizer)
        engine.save(path, model=model, optimizer=optimizer)
    else:
        engine.load(path, model=model, optimizer=optimizer)
    model.load_state_dict(model.state_dict())
    state = {name: each.tolist() for name, each in whole(model).items()}
    engine.teardown()
    return state


def test_your_own_loop_loads_what_another_strategy_saved(tmp_path: Path) -> None:
    def run(strategy: str, *arguments: Any) -> list[Any]:
        if strategy == "cpu":
            return [saved_or_loaded(strategy, *arguments)]
        return on_two_ranks(saved_or_loaded, strategy, *arguments)

    for first in ("cpu", "ddp", "fsdp"):
        saved = run(first, str(tmp_path / first), True)[0]
        assert sorted(saved) == ["0.bias", "0.weight"]
        for second in ("cpu", "fsdp") if first != "fsdp" else ("cpu", "ddp"):
            for loaded in run(second, str(tmp_path / first), False):
                assert loaded == saved
