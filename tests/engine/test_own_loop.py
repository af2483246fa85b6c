"""Your own loop over any module (`Engine.prepare`, `backward`, `step`, `save`, `load`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

from drivetrain import CheckpointError, ConfigError, Engine, OptimizerConfig


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def own_loop(engine: Engine, data: Any, micro_batches: int = 1) -> nn.Module:
    """The documented loop over an `nn.Module`, with token weights and accumulation."""
    task = NextToken(OptimizerConfig("sgd"))
    model, optimizer = engine.prepare(task, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    batches = engine.prepare_data(data)
    for number, batch in enumerate(batches, 1):
        engine.backward(task.loss(model(batch["tokens"]), batch), weight=task.loss_weight(batch))
        if number % micro_batches == 0 or number == len(batches):
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
        "endless weight": (lambda: engine.backward(loss, weight=float("inf")), "weight"),
        "a complex loss": (lambda: engine.backward(loss * 1j, weight=2), "complex64", ".abs()"),
    }
    assert_refused(ConfigError, cases)


def whole(module: nn.Module) -> dict[str, Tensor]:
    full = lambda each: each.full_tensor() if hasattr(each, "full_tensor") else each  # noqa: E731
    return {name: full(each).detach().clone() for name, each in module.state_dict().items()}


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
def test_each_sample_counts_once_in_a_short_last_round(strategy: str) -> None:
    # 17 samples: a last round of one sample, which one rank has no part of.
    alone = loop("cpu", 1, 4)
    for found in on_two_ranks(loop, strategy, 2, 2):
        torch.testing.assert_close(found[0], alone[0], rtol=1e-6, atol=1e-6)
        assert found[1] == alone[1] == 34


def test_ranks_that_prepare_different_things_are_refused() -> None:
    def prepare() -> None:
        rate, rates = 0.1 + torch.distributed.get_rank() / 10, "0.1 on rank 0 and 0.2 on rank 1"
        with Engine("ddp", devices=2) as engine, pytest.raises(ConfigError, match=rates):
            engine.prepare(nn.Linear(3, 1), lambda params: torch.optim.SGD(params, lr=rate))

    on_two_ranks(prepare)


def weightless() -> bool:
    """Rank 1 has nothing but padding in the first of two steps; whether the weights are finite then."""
    torch.manual_seed(0)
    engine = Engine("ddp", devices=2)
    model, optimizer = engine.prepare(nn.Linear(3, 2), sgd)
    for step in range(2):
        padding = engine.ranks.rank == 1 and step == 0
        labels = torch.full((2,), -100) if padding else torch.tensor([0, 1])
        scores, counted = model(torch.ones(2, 3)), int((labels >= 0).sum())
        engine.backward((scores.square().sum(1) * (labels >= 0)).sum() / counted, counted)
        engine.step(optimizer)
    finite = all(bool(each.isfinite().all()) for each in whole(model).values())
    engine.teardown()
    return finite


def test_a_backward_of_a_mean_over_nothing_counts_nothing() -> None:
    assert on_two_ranks(weightless) == [True, True]


def running_means(strategy: str) -> list[float]:
    """What this rank's batch norm has counted after two steps and an evaluation."""
    norm, engine = nn.BatchNorm1d(3), Engine(strategy, devices=2)
    model, optimizer = engine.prepare(norm, sgd)
    for step in range(2):
        samples = torch.tensor([[0.0], [2.0]]) + torch.ones(3) * (engine.ranks.rank + step)
        engine.backward(model(samples).sum())
        engine.step(optimizer)
    model.eval()(torch.ones(2, 3))
    engine.teardown()
    return norm.running_mean.tolist()


def test_buffers_of_all_ranks_are_rank_0s_at_each_forward() -> None:
    mean = pytest.approx([0.1 * 2 + 0.09 * 1] * 3)
    assert on_two_ranks(lambda: [running_means(each) for each in ("ddp", "fsdp")]) == [[mean, mean]] * 2


def saved_or_loaded(strategy: str, path: str, save: bool) -> dict[str, list[float]]:
    torch.manual_seed(0 if save else 1)
    engine = Engine(strategy, devices=1 if strategy == "cpu" else 2)
    model, optimizer = engine.prepare(nn.Sequential(nn.Linear(4, 2)), torch.optim.AdamW)
    if save:
        engine.backward(model(torch.ones(2, 4)).square().mean())
        engine.step(optimizer)
        engine.save(path, model=model, optimizer=optimizer)
    else:
        engine.load(path, model=model, optimizer=optimizer)
    state = {name: each.tolist() for name, each in whole(model).items()}
    engine.teardown()
    return state


def test_your_own_loop_loads_what_another_strategy_saved(tmp_path: Path) -> None:
    saved = on_two_ranks(saved_or_loaded, "fsdp", str(tmp_path / "saved"), True)[0]
    assert sorted(saved) == ["0.bias", "0.weight"]
    assert saved_or_loaded("cpu", str(tmp_path / "saved"), False) == saved
    assert on_two_ranks(saved_or_loaded, "ddp", str(tmp_path / "saved"), False) == [saved] * 2


def test_evaluation_data_of_your_own_loop_has_each_sample_once_on_ranks() -> None:
    def read() -> list[int]:
        with Engine("ddp", devices=2) as engine:
            return [len(target) for _, target in engine.prepare_data(pairs(5), training=False)]

    assert on_two_ranks(read) == [[2, 1], [2]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))


class Loop:  # a loop with dropout over shuffled data, which can be left and gone on with anywhere
    def __init__(self, data: Any, precision: str = "32") -> None:
        self.engine = Engine("cpu", precision, seed=3)
        adamw = lambda params: torch.optim.AdamW(params, lr=0.05)  # noqa: E731
        self.model, self.optimizer = self.engine.prepare(network(), adamw)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.data = self.engine.prepare_data(data)
        self.seen: list[list[float]] = []

    def steps(self, epochs: int) -> Iterator[int]:
        while self.engine.progress.epoch < epochs:
            for features, target in self.data:
                self.engine.backward(F.mse_loss(self.model(features), target))
                if self.engine.step(self.optimizer, max_grad_norm=1.0).applied:
                    self.schedule.step()
                self.seen.append(target.flatten().tolist())
                yield self.engine.progress.steps

    def run(self, epochs: int, until: int = 99) -> Loop:
        for steps in self.steps(epochs):
            if steps == until:
                break
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


def shuffled() -> DataLoader[Any]:
    features = torch.randn(14, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=4, shuffle=True)


@pytest.mark.parametrize("in_memory", [False, True], ids=["loader", "list"])
@pytest.mark.parametrize(("stop", "precision"), [(1, "32"), (4, "32"), (3, "16-mixed")])
def test_your_own_loop_resumes_bitwise(stop: int, precision: str, in_memory: bool, tmp_path: Path) -> None:
    data = list(shuffled()) if in_memory else shuffled()
    whole = Loop(data, precision).run(2)
    torch.manual_seed(stop)  # the engine's seed decides, from the first draw on
    first = Loop(data, precision).run(2, until=stop)
    path = str(tmp_path / "saved")
    first.engine.save(path, **first.parts(), note={"lr": [0.5]})
    second = Loop(data, precision)
    torch.manual_seed(99)
    assert second.engine.load(path, **second.parts()) == {"note": {"lr": [0.5]}}
    second.run(2)
    assert first.seen + second.seen == whole.seen
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert weights(second.model) == weights(whole.model)
    for file in (tmp_path / "saved").iterdir():  # nothing in it is pickled
        assert file.suffix in (".safetensors", ".json")
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))


def test_several_modules_and_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    def made() -> tuple[Engine, dict[str, Any], dict[str, Any]]:
        engine, models, optimizers = Engine("cpu"), {}, {}
        for name, size in (("first", 2), ("second", 3)):
            models[name], optimizers[name] = engine.prepare(nn.Linear(size, 1), torch.optim.Adam)
        return engine, models, optimizers

    engine, models, optimizers = made()
    for name, size in (("first", 2), ("second", 3)):
        engine.backward(models[name](torch.ones(1, size)).sum())
        engine.step(optimizers[name])
    engine.save(str(tmp_path / "saved"), model=models, optimizer=optimizers)
    other, others, other_optimizers = made()
    other.load(str(tmp_path / "saved"), model=others, optimizer=other_optimizers)
    assert other.progress.steps == 2
    for name, model in models.items():
        assert weights(model) == weights(others[name])
        assert str(other_optimizers[name].state_dict()) == str(optimizers[name].state_dict())


def test_refusals_of_save_and_load_leave_nothing_behind(tmp_path: Path) -> None:
    path, network_there, engine = str(tmp_path / "saved"), str(tmp_path / "network"), Engine("cpu")
    alone = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    shared = nn.Linear(1, 1)
    two = {"model": shared, "optimizer": {each: sgd(shared.parameters()) for each in "ab"}}
    cases: dict[str, tuple[Any, ...]] = {
        "a parameter twice": (lambda: engine.save(path, **two), "'a' and 'b' both have 'weight'"),
        "optimizer alone": (lambda: engine.save(path, optimizer=alone), "give the model too"),
        "unknown object": (lambda: engine.save(path, thing=object()), "thing"),
    }
    assert_refused((ConfigError, CheckpointError), cases)
    assert list(tmp_path.iterdir()) == []
    engine.save(path, epoch=3)
    Engine("cpu").save(network_there, model=network())
    engine.backward(torch.ones((), requires_grad=True))
    cases: dict[str, tuple[Any, ...]] = {
        "a name that was not saved": (lambda: engine.load(path, epochs=0), "'epochs'", "'epoch'"),
        "one that is there": (lambda: Engine("cpu").save(path, epoch=4), "there already"),
        "another network": (lambda: engine.load(network_there, model=nn.Linear(4, 6)), "'weight'"),
        "between backward and step": (lambda: engine.save(path + "2"), ": step first"),
    }
    assert_refused((ConfigError, CheckpointError), cases)
    assert Engine("cpu").load(path) == {"epoch": 3}


def test_evaluation_data_counts_into_no_progress_and_does_not_move_the_training() -> None:
    engine = Engine("cpu")
    batches = list(engine.prepare_data(pairs(5), training=False))
    assert [len(features) for features, _ in batches] == [2, 2, 1]
    assert (engine.progress.samples, engine.progress.epoch) == (0, 0)
    assert len(engine.prepare_data(shuffled())) == 4
    data, found = list(shuffled()), []
    for evaluate in (True, False):
        loop = Loop(data)
        evaluation = loop.engine.prepare_data(pairs(5, shuffle=True), training=False)
        for _ in loop.steps(1):
            if evaluate:
                with torch.no_grad():
                    loop.model.eval()
                    sum(float(loop.model(features).sum()) for features, _ in evaluation)
                    loop.model.train()
        found.append(weights(loop.model))
    assert found[0] == found[1]
