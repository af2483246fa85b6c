"""Each precision: what it stores and computes in, that it trains, and what it refuses."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Engine, NonFiniteError, OptimizerConfig, TaskModule
from drivetrain.data import MicroBatch
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision

STORED = dict.fromkeys(("bf16-true", "bf16-true-master"), torch.bfloat16)
STORED |= {"16-true": torch.float16, "64": torch.float64}
COMPUTED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, **STORED}


class Curve(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(1, 16)
        self.head = nn.Linear(16, 1)
        self.met: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.met = {"inputs": x.dtype, "computed": hidden.dtype, "made in the step": torch.zeros(()).dtype}
        return self.head(torch.tanh(hidden))

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(outputs.float(), batch["y"].float()) * batch.get("factor", torch.ones(1)).mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.2, momentum=0.8, schedule="linear")


def curve() -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 32)[:, None]
    return {"x": x, "y": torch.sin(3 * x), "number": torch.arange(32)}


def prepared(precision: str | Precision) -> tuple[Engine, Curve]:
    engine, task = Engine("cpu", precision), Curve()
    engine.prepare_task(task, total_steps=1000)
    engine.set_rates()
    return engine, task


def step(engine: Engine, factor: float = 1.0) -> Any:
    batch = engine.transfer({**curve(), "factor": torch.tensor([factor])})
    return engine.train_step([MicroBatch(batch, 32.0, samples=32)])


@pytest.mark.parametrize(
    "name", ["16-mixed", "32", "64", "bf16-mixed", "16-true", "bf16-true", "bf16-true-master"]
)
def test_precision_trains_in_its_dtypes_and_leaves_the_default_alone(name: str) -> None:
    engine, task = prepared(name)
    first = step(engine).loss
    for _ in range(60):
        last = step(engine).loss
    assert last < 0.2 * first
    stored = STORED.get(name, torch.float32)
    assert task.hidden.weight.dtype is stored
    computed = COMPUTED.get(name, torch.float32)
    assert task.met == {"inputs": stored, "computed": computed, "made in the step": stored}
    assert torch.get_default_dtype() is torch.float32
    assert engine.transfer(curve())["number"].dtype is torch.int64, "whole numbers are never cast"


def test_only_floating_point_numbers_of_a_module_are_converted() -> None:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.ones(2)))
    module.register_buffer("running", torch.zeros(2))
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    module.register_buffer("rotation", torch.tensor([1 + 2j], dtype=torch.complex64))
    assert as_precision("bf16-true").convert_module(module) is module
    dtypes = [tensor.dtype for tensor in module.state_dict().values()]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.int64, torch.complex64]
    assert module.get_buffer("rotation").tolist() == [1 + 2j]


def test_precision_of_ones_own_may_differ_in_dtypes_or_bring_its_own_code() -> None:
    engine, task = prepared(Precision("mine", param_dtype=torch.float32, compute_dtype=torch.bfloat16))
    assert step(engine).applied
    assert (task.met["computed"], task.met["inputs"]) == (torch.bfloat16, torch.float32)
    entered: list[torch.device] = []

    class Eighth(Precision):
        def forward_context(self, device: torch.device) -> Any:
            return lambda: nullcontext(entered.append(device))

    engine, task = prepared(Eighth("8-mixed", compute_dtype=torch.float8_e4m3fn))
    assert step(engine).applied
    assert entered == [torch.device("cpu")]
    assert task.hidden.weight.dtype is torch.float32


# Loss scaling.


def weights(task: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters()]


def test_overflow_is_skipped_and_moves_no_weight_rate_counter_or_average() -> None:
    engine, task = prepared("16-mixed")
    step(engine)
    optimizer = engine.updaters["default"].optimizer

    def state() -> list[Any]:
        slots = [optimizer.state[each]["momentum_buffer"].tolist() for each in task.parameters()]
        rate = optimizer.param_groups[0]["lr"]
        return [[each.tolist() for each in task.parameters()], slots, rate, engine.buffer.means()]

    before, scale = state(), engine.strategy.state_dict()["scaler"]["scale"]
    assert not step(engine, 1e36).applied
    assert state() == before
    assert (engine.progress.steps, engine.progress.epoch_steps, engine.progress.skipped) == (1, 1, 1)
    assert engine.progress.samples == 64, "its samples were seen all the same"
    assert engine.strategy.state_dict()["scaler"]["scale"] == scale / 2
    assert all(parameter.grad is None for parameter in task.parameters())


def test_training_goes_on_after_an_overflow_as_if_it_had_not_been() -> None:
    first, second = prepared("16-mixed"), prepared("16-mixed")
    for number in range(4):
        if number == 2:
            step(first[0], 1e36)
        step(first[0])
        step(second[0])
    # The scale is a power of two, so that dividing by it changes no digit.
    assert all(map(torch.equal, weights(first[1]), weights(second[1])))
    assert first[0].progress.steps == second[0].progress.steps == 4


def test_small_gradients_survive_in_16_bit_because_of_the_scale() -> None:
    moved = []
    for precision in ("16-mixed", "32"):
        engine, task = prepared(precision)
        before = weights(task)
        step(engine, 1e-6)
        moved.append([after - old for old, after in zip(before, weights(task), strict=True)])
    assert moved[1][0].abs().max() > 0
    torch.testing.assert_close(moved[0], moved[1], rtol=0.1, atol=2e-8)


def test_loss_that_is_not_finite_is_no_overflow() -> None:
    engine, _ = prepared("16-mixed")
    step(engine)
    with pytest.raises(NonFiniteError, match=r"NaN or infinite at step 1 on rank 0: 'loss'"):
        step(engine, torch.nan)
