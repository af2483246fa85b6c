"""Weights of 16 bits learn: small updates are not lost, whatever the optimizer, and resumes are exact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import CheckpointError, ConfigError, Engine, OptimizerConfig, ParameterGroup, TaskModule
from drivetrain.checkpoint import CheckpointConfig, load_weights
from drivetrain.core.progress import Progress
from drivetrain.data import MicroBatch
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.task.optim.config import OPTIMIZERS
from drivetrain.task.optim.low_precision import WeightUpdates, round_at_random_
from drivetrain.task.optim.quantized import QUANTIZED
from drivetrain.testing.strategies.tasks import GeneratorAndDiscriminator, Sequences, Tokens

LEARNING = ("bf16-true", "bf16-true-master", "16-true", "16-true-master")
LOSING = ("bf16-true-nearest", "16-true-nearest")


class Ones(TaskModule):
    """A layer of ones, of which half the outputs are to be larger and half to be smaller."""

    def __init__(self, optimizer: Any, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.register_buffer("sign", torch.tensor([1.0, -1.0]).repeat(width // 2))
        with torch.no_grad():
            for each in self.parameters():
                each.fill_(1.0)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net[0](x) + self.net[1].weight + self.net[1].bias
        return made

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (outputs * self.sign).float().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def trained(precision: str | Precision, optimizer: Any, updates: int = 100) -> tuple[Engine, Ones]:
    engine, task = Engine("cpu", precision), Ones(optimizer)
    engine.prepare_task(task, total_updates=updates)
    engine.set_rates()
    batch = engine.transfer({"x": torch.rand(8, 32, generator=torch.Generator().manual_seed(0)) + 0.5})
    for _ in range(updates):
        engine.train_step([MicroBatch(batch, 8.0, samples=8)])
    return engine, task


def values(task: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in task.parameters()]).double()


# That weights move.


@pytest.mark.parametrize("precision", LEARNING)
def test_small_updates_move_weights_and_in_the_mean_as_far_as_in_float32(precision: str) -> None:
    _, exact = trained("32", OptimizerConfig("adamw", lr=1e-4))
    _, task = trained(precision, OptimizerConfig("adamw", lr=1e-4))
    assert {each.dtype for each in task.parameters()} == {PRECISIONS[precision].param_dtype}
    assert (values(task) != 1).double().mean() > 0.5
    spacing = 2.0**-7 if "bf16" in precision else 2.0**-10
    # Rounding at random is a random walk of 100 steps of one spacing, each with probability 1e-4 / spacing.
    walk = 0.0 if "master" in precision else 6 * (100 * 1e-4 * spacing) ** 0.5
    assert (values(task) - values(exact)).abs().max() <= spacing + walk
    wanted = values(exact) - 1
    moved = ((values(task) - 1) * wanted.sign()).mean() / wanted.abs().mean()
    assert abs(moved - 1) < (0.25 if precision == "bf16-true-master" else 0.1)


@pytest.mark.parametrize("precision", LOSING)
def test_to_the_nearest_small_updates_are_lost(precision: str) -> None:
    _, task = trained(precision, OptimizerConfig("adamw", lr=1e-4))
    assert (values(task) == 1).all()


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-true-master"])
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"sparseadam", *QUANTIZED}))
def test_every_optimizer_learns_as_in_float32(name: str, precision: str) -> None:
    rates = {"sgd": 1.0, "asgd": 1.0, "adadelta": 10.0, "adagrad": 3e-3, "radam": 0.02, "muon": 3e-3}
    config = OptimizerConfig(name, lr=rates.get(name, 1e-3))
    _, exact = trained("32", config, 20)
    engine, task = trained(precision, config, 20)
    moved = (values(exact) - 1).abs()
    assert moved.mean() > 2e-3
    assert ((values(task) - 1).mean() - (values(exact) - 1).mean()).abs() < 0.1 * moved.mean() + 1e-3
    state = engine.updaters["default"].optimizer.state
    assert set(state) <= set(task.parameters()), "the state is by the task's own parameters"
    dtypes = {each.dtype for slots in state.values() for each in slots.values() if torch.is_tensor(each)}
    assert dtypes <= {torch.float32}


def test_sparse_gradients_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Embedding(50, 4, sparse=True, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    for kind in ("stochastic", "master"):
        with WeightUpdates(kind).building(module) as finish:
            optimizer = finish(torch.optim.SparseAdam(module.parameters(), lr=0.1))
        module(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert (module.weight[3] < 1).all()
        assert (module.weight[4] == 1).all()
        optimizer.zero_grad()


def test_a_user_s_factory_schedule_and_tags_work_as_in_float32() -> None:
    def make(parameters: list[nn.Parameter]) -> Any:
        groups = [
            {"params": [each for each in parameters if getattr(each, "slow", False)], "lr": 1e-5},
            {"params": [each for each in parameters if not getattr(each, "slow", False)]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    task = Ones(make)
    for each in task.net[1].parameters():
        each.slow = True  # type: ignore[attr-defined]
    engine = Engine("cpu", "bf16-true")
    engine.prepare_task(task, total_updates=4)
    batch = engine.transfer({"x": torch.ones(2, 32)})
    for _ in range(4):
        engine.train_step([MicroBatch(batch, 2.0, samples=2)])
    optimizer = engine.updaters["default"].optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [1e-5 / 4, 1e-2 / 4]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert (values(task.net[0]) != 1).all()
    assert (values(task.net[1]) == 1).double().mean() > 0.9


def test_groups_clipping_accumulation_frozen_weights_and_generators() -> None:
    config = OptimizerConfig(
        "sgd", lr=1.0, momentum=0.9, max_grad_norm=0.1, groups=ParameterGroup("net.1.*", lr=0.5)
    )
    changes = []
    for precision in ("32", "bf16-true-master"):
        task = Ones(config)
        task.net[0].bias.requires_grad_(False)
        engine = Engine("cpu", precision)
        engine.prepare_task(task, total_updates=8)
        batch = engine.transfer({"x": torch.ones(2, 32)})
        for _ in range(8):
            result = engine.train_step([MicroBatch(batch, 2.0, samples=2)] * 2)
        assert result.grad_norm is not None
        assert (task.net[0].bias == 1).all()
        changes.append(values(task) - 1)
    assert changes[0].abs().max() > 0.02
    assert torch.allclose(*changes, atol=2**-8)

    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(3)]
    duel = GeneratorAndDiscriminator()
    before = values(duel)
    quiet(precision="bf16-true", max_epochs=1).fit(duel, data)
    assert (values(duel) != before).double().mean() > 0.9


# Rounding at random.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [1.001, -1.001, 0.3, -123.4, 7e-5, 30001.0])
def test_numbers_become_their_neighbours_as_often_as_they_are_near(number: float, dtype: torch.dtype) -> None:
    numbers = torch.full((2**18,), number)
    round_at_random_(numbers, dtype, torch.Generator().manual_seed(0))
    found = numbers.unique()
    assert torch.equal(found, found.to(dtype).float()), "what is left is in the dtype"
    exact = float(torch.tensor(number))
    low, high = found.tolist()
    assert low < exact < high
    nearest = torch.tensor(exact).to(dtype)
    assert float(nearest) in (low, high)
    assert abs(float(numbers.double().mean()) - exact) < 0.01 * (high - low)


def test_what_the_dtype_has_stays_and_what_is_no_number_is_not_hidden() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-130, 3e38]).bfloat16().float()
    for seed in range(200):
        numbers = exact.clone()
        round_at_random_(numbers, torch.bfloat16, torch.Generator().manual_seed(seed))
        assert torch.equal(numbers.view(torch.int32), exact.view(torch.int32))
    # All NaN that there are have some of these bits; some devices make the first two.
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -(2**31) + 0x7F800000])
    for seed in range(200):
        bad = bits.to(torch.int32).view(torch.float32).clone()
        round_at_random_(bad, torch.bfloat16, torch.Generator().manual_seed(seed))
        assert not bad.bfloat16().isfinite().any()


def test_rounding_is_a_function_of_seed_and_update_and_moves_no_other_stream() -> None:
    def make(seed: int, updates: int) -> Tensor:
        module = nn.Linear(64, 64, dtype=torch.bfloat16)
        nn.init.ones_(module.weight)
        progress = Progress()
        with WeightUpdates("stochastic", seed, progress).building(module) as finish:
            optimizer = finish(torch.optim.SGD(module.parameters(), lr=1e-3))
        module.weight.grad = torch.ones_like(module.weight)
        progress.updates = updates
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(state, torch.get_rng_state())
        return module.weight.detach().clone()

    assert torch.equal(make(0, 5), make(0, 5))
    assert not torch.equal(make(0, 5), make(0, 6))
    assert not torch.equal(make(0, 5), make(1, 5))


@pytest.mark.parametrize("kind", ["stochastic", "master"])
def test_weights_are_updated_piece_by_piece_as_all_at_once(kind: str) -> None:
    found = []
    for piece in (1, 3000, 10**9):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5))).bfloat16()
        exact = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        exact.load_state_dict(module.state_dict())
        with WeightUpdates(kind, piece=piece).building(module) as finish:
            config = [
                {"params": list(module[:2].parameters()), "lr": 0.01},
                {"params": module[2:].parameters()},
            ]
            optimizer = finish(torch.optim.AdamW(config, lr=0.02))
        reference = torch.optim.AdamW(
            [{"params": list(exact[:2].parameters()), "lr": 0.01}, {"params": exact[2:].parameters()}],
            lr=0.02,
        )
        for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
            theirs.grad = mine.grad.float()
        optimizer.step()
        reference.step()
        for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
            assert ((mine - theirs).abs() <= theirs.abs() * 2**-7 + 1e-6).all()
        assert all(slots["step"] == 1 for slots in optimizer.state.values()), "each was updated once"
        found.append(values(module))
    if kind == "master":
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_an_optimizer_that_may_count_for_all_its_weights_steps_once() -> None:
    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    with WeightUpdates("stochastic", piece=1).building(module) as finish:
        optimizer = finish(Counted(module.parameters(), lr=1.0))
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert optimizer.steps == 1


def test_memory_is_what_the_page_says_and_what_a_plan_tells() -> None:
    for kind, expected in (("stochastic", 8), ("master", 12), ("nearest", 4)):
        module = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        with WeightUpdates(kind).building(module) as finish:
            optimizer = finish(torch.optim.AdamW(module.parameters()))
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
        slots = [each for each in optimizer.state[module.weight].values() if each.ndim]
        assert sum(each.numel() * each.itemsize for each in slots) == expected * 64 * 64
    plan = {
        name: quiet(precision=name, max_steps=1).plan(
            Ones(OptimizerConfig("adamw")), [{"x": torch.ones(2, 32)}]
        )
        for name in ("bf16-true", "bf16-true-master", "bf16-true-nearest")
    }
    count = values(Ones(None)).numel()
    sizes = {name: each.memory["optimizer"] for name, each in plan.items()}
    assert sizes["bf16-true-master"] - sizes["bf16-true"] == 4 * count
    assert sizes["bf16-true"] - sizes["bf16-true-nearest"] == 4 * count


# The copies that are kept.


def test_a_weight_that_is_written_to_counts_and_the_others_keep_their_digits() -> None:
    module = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    with WeightUpdates("master").building(module) as finish:
        optimizer = finish(torch.optim.SGD(module.parameters(), lr=1e-3))
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    with torch.no_grad():
        module.weight[0] = 5.0
    optimizer.step()
    kept = optimizer.state[module.weight]["master"]
    assert torch.allclose(kept[0], torch.tensor(5 - 1e-3), atol=1e-6, rtol=0)
    assert torch.allclose(kept[1:], torch.tensor(1 - 2e-3), atol=1e-6, rtol=0)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("out of luck")

    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    before = values(module)
    for kind in ("stochastic", "master"):
        with WeightUpdates(kind).building(module) as finish:
            optimizer = finish(Failing(module.parameters(), lr=1.0, momentum=0.9))
        for each in module.parameters():
            each.grad = torch.ones_like(each)
        with pytest.raises(ValueError, match="out of luck"):
            optimizer.step()
        assert list(optimizer.param_groups[0]["params"]) == list(module.parameters())
        assert set(optimizer.state) <= set(module.parameters())
        assert torch.equal(values(module), before)


def test_a_closure_is_refused() -> None:
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    with WeightUpdates("stochastic").building(module) as finish:
        optimizer = finish(torch.optim.SGD(module.parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


# Resuming.


def fit(
    precision: str, directory: Path, stop: int | None, resume: str | None = None, seed: int = 0
) -> Tokens:
    task = Tokens(schedule="cosine", dropout=0.2)
    saved = CheckpointConfig(every="2 steps", keep_last=1, best=0)
    trainer = quiet(
        precision=precision, max_epochs=None, max_steps=stop or 6, run_dir=directory, checkpoint=saved,
        gradient_accumulation_steps=2, max_grad_norm=0.5, validate_every=None,
    )  # fmt: skip
    trainer.fit(task, DataLoader(Sequences(), batch_size=2, shuffle=True), resume=resume)
    return task


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-true-master", "16-true"])
def test_another_way_of_updates_is_refused_when_a_run_resumes(precision: str, tmp_path: Path) -> None:
    fit(precision, tmp_path, 2)
    other = "bf16-true-nearest" if "bf16" in precision else "16-true-master"
    theirs = PRECISIONS[precision].updates
    with pytest.raises(CheckpointError, match=rf"is Precision\(updates='{theirs}'\), here Precision"):
        fit(other, tmp_path, 4, resume="auto")


def test_exported_weights_are_of_16_bits_and_kept_copies_are_by_name(tmp_path: Path) -> None:
    task = fit("bf16-true-master", tmp_path, 2)
    stored = load_weights(tmp_path / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.bfloat16}
    for name, each in task.state_dict().items():
        assert torch.equal(stored[name], each)


def test_the_native_loop_learns_saves_and_goes_on_alike(tmp_path: Path) -> None:
    def begin() -> tuple[Engine, nn.Module, torch.optim.Optimizer]:
        engine = Engine("cpu", "bf16-true-master")
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        return (engine, *engine.prepare(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)))

    def train(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
        for _ in range(updates):
            x = torch.ones(4, 8, dtype=torch.bfloat16)
            engine.backward(F.mse_loss(model(x), x))
            engine.step(optimizer, max_grad_norm=1.0)

    engine, model, optimizer = begin()
    train(engine, model, optimizer, 4)
    whole = values(model)
    engine.teardown()
    engine, model, optimizer = begin()
    train(engine, model, optimizer, 2)
    engine.save(str(tmp_path / "there"), model=model, optimizer=optimizer)
    engine.teardown()
    engine, model, optimizer = begin()
    engine.load(str(tmp_path / "there"), model=model, optimizer=optimizer)
    train(engine, model, optimizer, 2)
    assert torch.equal(values(model), whole)
    engine.teardown()


def test_unknown_updates_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown updates 'stochastical'\. Did you mean 'stochastic'"):
        Precision("mine", torch.bfloat16, torch.bfloat16, updates="stochastical")
