"""Weights of 16 bits learn: small updates are not lost, whatever the optimizer, and resumes are exact."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import CheckpointError, ConfigError, Engine, OptimizerConfig, ParameterGroup, TaskModule
from drivetrain.checkpoint import CheckpointConfig, load_weights
from drivetrain.core.progress import Progress
from drivetrain.data import MicroBatch
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.task.optim.low_precision import WeightUpdates, round_at_random_
from drivetrain.testing.strategies.tasks import Sequences, Tokens


class Ones(TaskModule):  # a layer of ones; half the outputs are to be larger and half to be smaller
    def __init__(self, optimizer: Any, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.register_buffer("sign", torch.tensor([1.0, -1.0]).repeat(width // 2))
        for each in self.parameters():
            nn.init.ones_(each)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net[0](x) + self.net[1].weight + self.net[1].bias

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (outputs * self.sign).float().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def values(task: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in task.parameters()]).double()


def train(task: TaskModule, precision: Any, steps: int, x: Any = None, micro_batches: int = 1) -> Engine:
    engine = Engine("cpu", precision)
    engine.prepare_task(task, total_steps=steps)
    engine.set_rates()
    batch = engine.transfer({"x": torch.ones(2, 32) if x is None else x})
    for _ in range(steps):
        engine.train_step([MicroBatch(batch, 2.0, samples=2)] * micro_batches)
    return engine


def trained(precision: Any, optimizer: Any, steps: int = 100) -> tuple[Engine, Ones]:
    task, x = Ones(optimizer), torch.rand(8, 32, generator=torch.Generator().manual_seed(0)) + 0.5
    return train(task, precision, steps, x), task


def built(kind: str, module: nn.Module, make: Any, *more: Any, **options: Any) -> torch.optim.Optimizer:
    with WeightUpdates(kind, *more, **options).building(module) as finish:
        return finish(make(module.parameters()))


def with_gradients(module: nn.Module) -> nn.Module:
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    return module


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-true-master", "16-true", "16-true-master"])
def test_small_steps_move_weights_and_in_the_mean_as_far_as_in_float32(precision: str) -> None:
    adamw = OptimizerConfig("adamw", lr=1e-4)
    _, exact = trained("32", adamw)
    _, task = trained(precision, adamw)
    assert {each.dtype for each in task.parameters()} == {PRECISIONS[precision].param_dtype}
    assert (values(task) != 1).double().mean() > 0.5
    spacing = 2.0**-7 if "bf16" in precision else 2.0**-10
    # Rounding at random is a random walk of 100 steps of one spacing, each with probability 1e-4 / spacing.
    walk = 0.0 if "master" in precision else 6 * (100 * 1e-4 * spacing) ** 0.5
    assert (values(task) - values(exact)).abs().max() <= spacing + walk
    wanted = values(exact) - 1
    moved = ((values(task) - 1) * wanted.sign()).mean() / wanted.abs().mean()
    assert abs(moved - 1) < (0.25 if precision == "bf16-true-master" else 0.1)
    if "master" not in precision:  # rounded to the nearest they are lost
        assert (values(trained(f"{precision}-nearest", adamw)[1]) == 1).all()


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "adafactor", "muon"])
def test_optimizers_of_every_family_learn_as_in_float32(name: str) -> None:
    rates = {"sgd": 1.0, "adagrad": 3e-3, "muon": 3e-3}
    config = OptimizerConfig(name, lr=rates.get(name, 1e-3))
    _, exact = trained("32", config, 20)
    moved = (values(exact) - 1).abs()
    assert moved.mean() > 2e-3
    for precision in ("bf16-true", "bf16-true-master"):
        engine, task = trained(precision, config, 20)
        difference = (values(task) - 1).mean() - (values(exact) - 1).mean()
        assert difference.abs() < 0.1 * moved.mean() + 1e-3
        state = engine.updaters["default"].optimizer.state
        assert set(state) <= set(task.parameters()), "the state is by the task's own parameters"
        tensors = (each for slots in state.values() for each in slots.values() if torch.is_tensor(each))
        assert {each.dtype for each in tensors} <= {torch.float32}


def test_groups_clipping_accumulation_and_frozen_weights_work_as_in_float32() -> None:
    groups = ParameterGroup("net.1.*", lr=0.5)
    config = OptimizerConfig("sgd", lr=1.0, momentum=0.9, max_grad_norm=0.1, groups=groups)
    changes = []
    for precision in ("32", "bf16-true-master"):
        task = Ones(config)
        task.net[0].bias.requires_grad_(False)
        train(task, precision, 8, micro_batches=2)
        assert (task.net[0].bias == 1).all()
        changes.append(values(task) - 1)
    assert changes[0].abs().max() > 0.02
    assert torch.allclose(*changes, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_become_their_neighbours_as_often_as_they_are_near(dtype: torch.dtype) -> None:
    for number in (1.001, -1.001, 0.3, -123.4, 7e-5, 30001.0):
        numbers = torch.full((2**18,), number)
        round_at_random_(numbers, dtype, torch.Generator().manual_seed(0))
        found, exact = numbers.unique(), float(torch.tensor(number))
        assert torch.equal(found, found.to(dtype).float()), "what is left is in the dtype"
        low, high = found.tolist()
        assert low < exact < high
        assert float(torch.tensor(exact).to(dtype)) in (low, high)
        assert abs(float(numbers.double().mean()) - exact) < 0.01 * (high - low)


def test_what_the_dtype_has_stays_and_what_is_no_number_is_not_hidden() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-130, 3e38]).bfloat16().float()
    # All NaN that there are have some of these bits; some devices make the first two.
    patterns = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -(2**31) + 0x7F800000]
    bits = torch.tensor(patterns).to(torch.int32)
    for seed in range(200):
        numbers, bad = exact.clone(), bits.view(torch.float32).clone()
        for each in (numbers, bad):
            round_at_random_(each, torch.bfloat16, torch.Generator().manual_seed(seed))
        assert torch.equal(numbers.view(torch.int32), exact.view(torch.int32))
        assert not bad.bfloat16().isfinite().any()


def test_rounding_is_a_function_of_seed_and_step_and_moves_no_other_stream() -> None:
    def make(seed: int, steps: int) -> Tensor:
        module, progress = nn.Linear(64, 64, dtype=torch.bfloat16), Progress()
        nn.init.ones_(module.weight)
        sgd = lambda each: torch.optim.SGD(each, lr=1e-3)  # noqa: E731
        optimizer = built("stochastic", with_gradients(module), sgd, seed, progress)
        progress.steps = steps
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(state, torch.get_rng_state())
        return module.weight.detach().clone()

    assert torch.equal(make(0, 5), make(0, 5))
    assert not torch.equal(make(0, 5), make(0, 6))
    assert not torch.equal(make(0, 5), make(1, 5))


@pytest.mark.parametrize("kind", ["stochastic", "master"])
def test_weights_are_updated_piece_by_piece_as_all_at_once(kind: str) -> None:
    def adamw(module: nn.Sequential) -> torch.optim.Optimizer:
        groups = [{"params": module[:2].parameters(), "lr": 0.01}, {"params": module[2:].parameters()}]
        return torch.optim.AdamW(groups, lr=0.02)

    found = []
    for piece in (1, 3000, 10**9):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5))).bfloat16()
        exact = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        exact.load_state_dict(module.state_dict())
        optimizers = [built(kind, module, lambda _, module=module: adamw(module), piece=piece), adamw(exact)]
        for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
            theirs.grad = mine.grad.float()
        for each in optimizers:
            each.step()
        for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
            assert ((mine - theirs).abs() <= theirs.abs() * 2**-7 + 1e-6).all()
        assert all(slots["step"] == 1 for slots in optimizers[0].state.values()), "each was updated once"
        found.append(values(module))
    assert kind != "master" or all(torch.equal(found[0], each) for each in found[1:])


def test_steps_in_16_bits_take_the_memory_that_the_page_says() -> None:
    for kind, state, copy in (("stochastic", 8, 0), ("master", 12, 4), ("nearest", 4, None)):
        module = with_gradients(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
        optimizer: Any = built(kind, module, torch.optim.AdamW)
        optimizer.step()
        slots = [each for each in optimizer.state[module.weight].values() if each.ndim]
        assert sum(each.nbytes for each in slots) == state * 64 * 64
        if copy is not None:  # what is left between two steps beside the state, which has it too
            copies = optimizer.step.func.__self__._pieces[0][0][0]
            held = [each.whole.untyped_storage().nbytes() for each in (copies._values, copies._gradients)]
            assert held == [copy * 64 * 64, 0]


def test_a_weight_that_is_written_to_counts_and_the_others_keep_their_digits() -> None:
    module = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = built("master", with_gradients(module), lambda each: torch.optim.SGD(each, lr=1e-3))
    optimizer.step()
    with torch.no_grad():
        module.weight[0] = 5.0
    optimizer.step()
    kept = optimizer.state[module.weight]["master"]
    assert torch.allclose(kept[:, 0], torch.tensor([5 - 1e-3, *[1 - 2e-3] * 3]), atol=1e-6, rtol=0)


class Counted(torch.optim.SGD):  # an optimizer that may count for all its weights, and may fail
    steps, fails = 0, False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("out of luck")
        self.steps += 1
        return super().step(closure)


def test_an_optimizer_of_a_user_steps_once_and_is_as_before_after_an_error() -> None:
    module = with_gradients(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16())
    optimizer: Any = built("stochastic", module, lambda each: Counted(each, lr=1.0), piece=1)
    optimizer.step()
    assert optimizer.steps == 1
    before = values(module)
    for kind in ("stochastic", "master"):
        optimizer = built(kind, module, lambda each: Counted(each, lr=1.0, momentum=0.9))
        optimizer.fails = True
        with pytest.raises(ValueError, match="out of luck"):
            optimizer.step()
        assert list(optimizer.param_groups[0]["params"]) == list(module.parameters())
        assert set(optimizer.state) <= set(module.parameters())
        assert torch.equal(values(module), before)


def fit(precision: str, directory: Path, stop: int, resume: str | None = None) -> Tokens:
    task = Tokens(schedule="cosine", dropout=0.2)
    saved = {"checkpoint": CheckpointConfig(every="2 steps", keep_last=1, best=0), "run_dir": directory}
    trainer = quiet(precision=precision, max_steps=stop, gradient_accumulation_steps=2, **saved)
    trainer.fit(task, DataLoader(Sequences(), batch_size=2, shuffle=True), resume=resume)
    return task


def test_refusals_of_other_updates(tmp_path: Path) -> None:
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = built("stochastic", module, torch.optim.SGD)
    misspelt = lambda: Precision("mine", torch.bfloat16, torch.bfloat16, updates="stochastical")  # noqa: E731
    table: dict[str, Any] = {
        "a closure": (lambda: optimizer.step(lambda: 0.0), "takes no closure"),
        "misspelt": (misspelt, "'stochastical'", "'stochastic'"),
    }
    for one, other in (("bf16-true", "bf16-true-nearest"), ("16-true", "16-true-master")):
        fit(one, tmp_path / one, 2)
        resumes = lambda one=one, other=other: fit(other, tmp_path / one, 4, resume="auto")  # noqa: E731
        table[one] = (resumes, f"Precision(updates='{PRECISIONS[one].updates}')")
    assert_refused((ConfigError, CheckpointError), table)


def test_exported_weights_are_of_16_bits_and_kept_copies_are_by_name(tmp_path: Path) -> None:
    task = fit("bf16-true-master", tmp_path, 2)
    stored = load_weights(tmp_path / "model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.bfloat16}
    for name, each in task.state_dict().items():
        assert torch.equal(stored[name], each)
