"""Each precision: what it stores and computes in, that it trains, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import ConfigError, Engine, NonFiniteError, OptimizerConfig, TaskModule, Trainer
from drivetrain.data import MicroBatch
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import PRECISIONS, as_precision

CPU = torch.device("cpu")
ON_GPUS = ("fp8", "tf32")
STORED = {
    **dict.fromkeys(("16-true", "16-true-master", "16-true-nearest"), torch.float16),
    **dict.fromkeys(("bf16-true", "bf16-true-master", "bf16-true-nearest"), torch.bfloat16),
    "64": torch.float64,
}
NAMES = tuple(sorted({"16-mixed", "32", "bf16-mixed", *STORED}))
COMPUTED = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    **STORED,
}


class Curve(TaskModule):
    """Two layers that fit a curve; notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(1, 16)
        self.head = nn.Linear(16, 1)
        self.met: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        made = torch.zeros(())
        self.met = {"inputs": x.dtype, "computed": hidden.dtype, "made in the step": made.dtype}
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
    engine.prepare_task(task, total_updates=1000)
    engine.set_rates()
    return engine, task


def step(engine: Engine, **columns: Tensor) -> Any:
    batch = engine.transfer({**curve(), **columns})
    return engine.train_step([MicroBatch(batch, 32.0, samples=32)])


def test_these_are_the_built_in_precisions() -> None:
    assert tuple(PRECISIONS) == tuple(sorted({*NAMES, *ON_GPUS}))


@pytest.mark.parametrize("name", NAMES)
def test_each_precision_trains(name: str) -> None:
    engine, task = prepared(name)
    first = step(engine).loss
    for _ in range(60):
        last = step(engine).loss
    assert last < 0.2 * first
    assert task.hidden.weight.dtype is STORED.get(name, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_each_precision_meets_its_dtypes_and_leaves_the_default_alone(name: str) -> None:
    engine, task = prepared(name)
    step(engine)
    assert task.met == {
        "inputs": STORED.get(name, torch.float32),
        "computed": COMPUTED.get(name, torch.float32),
        "made in the step": STORED.get(name, torch.float32),
    }
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("name", ["bf16-true", "64"])
def test_the_default_dtype_is_restored_after_a_step_that_raises(name: str) -> None:
    engine, _ = prepared(name)
    with pytest.raises(KeyError):
        engine.train_step([MicroBatch({"x": torch.ones(2, 1, dtype=STORED[name])}, 2.0)])
    assert torch.get_default_dtype() is torch.float32


def test_whole_numbers_in_a_batch_are_never_cast() -> None:
    engine, _ = prepared("bf16-true")
    assert engine.transfer(curve())["number"].dtype is torch.int64


def test_only_floating_point_numbers_of_a_module_are_converted() -> None:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.ones(2)))
    module.register_buffer("running", torch.zeros(2))
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    module.register_buffer("rotation", torch.tensor([1 + 2j], dtype=torch.complex64))
    assert as_precision("bf16-true").convert_module(module) is module
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert dtypes == {
        "weight": torch.bfloat16,
        "running": torch.bfloat16,
        "count": torch.int64,
        "rotation": torch.complex64,
    }
    assert module.get_buffer("rotation").tolist() == [1 + 2j]


def test_parameters_keep_the_dtypes_of_the_task_when_none_is_asked_for() -> None:
    module = nn.Linear(1, 1, dtype=torch.float64)
    assert as_precision("bf16-mixed").convert_module(module).weight.dtype is torch.float64


def test_parameters_and_compute_may_differ() -> None:
    """Mixed precision that also brings a task's parameters to float32."""
    engine, task = prepared(Precision("mine", param_dtype=torch.float32, compute_dtype=torch.bfloat16))
    assert step(engine).applied
    assert task.met["computed"] is torch.bfloat16
    assert task.met["inputs"] is torch.float32


def test_a_precision_that_brings_its_own_code_is_believed() -> None:
    entered: list[torch.device] = []

    class Eighth(Precision):
        def forward_context(self, device: torch.device) -> Any:
            return lambda: nullcontext(entered.append(device))

    engine, task = prepared(Eighth("8-mixed", compute_dtype=torch.float8_e4m3fn))
    assert step(engine).applied
    assert entered == [CPU]
    assert task.hidden.weight.dtype is torch.float32


# Loss scaling.


OVERFLOW = {"factor": torch.tensor([1e36])}


def weights(task: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters()]


def test_an_overflow_is_skipped_and_moves_no_weight_rate_counter_or_average() -> None:
    engine, task = prepared("16-mixed")
    step(engine)
    optimizer = engine.updaters["default"].optimizer
    before = weights(task)
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in task.parameters()]
    rate, averages = optimizer.param_groups[0]["lr"], engine.buffer.means()
    scale = engine.strategy.state_dict()["scaler"]["scale"]

    skipped = step(engine, **OVERFLOW)

    assert not skipped.applied
    assert (engine.progress.updates, engine.progress.epoch_updates, engine.progress.skipped) == (1, 1, 1)
    assert engine.progress.samples == 64, "its samples were seen all the same"
    assert all(map(torch.equal, before, weights(task)))
    assert all(
        torch.equal(old, optimizer.state[p]["momentum_buffer"])
        for old, p in zip(momentum, task.parameters(), strict=True)
    )
    assert optimizer.param_groups[0]["lr"] == rate
    assert engine.buffer.means() == averages
    assert engine.strategy.state_dict()["scaler"]["scale"] == scale / 2
    assert all(parameter.grad is None for parameter in task.parameters())


def test_training_goes_on_after_an_overflow_as_if_it_had_not_been() -> None:
    first, second = prepared("16-mixed"), prepared("16-mixed")
    for number in range(4):
        if number == 2:
            step(first[0], **OVERFLOW)
        step(first[0])
        step(second[0])
    # The scale is a power of two, so that dividing by it changes no digit.
    assert all(map(torch.equal, weights(first[1]), weights(second[1])))
    assert first[0].progress.updates == second[0].progress.updates == 4


def test_small_gradients_survive_in_16_bit_because_of_the_scale() -> None:
    engine, task = prepared("16-mixed")
    before = weights(task)
    step(engine, factor=torch.tensor([1e-6]))
    scaled = [after - old for old, after in zip(before, weights(task), strict=True)]
    engine, task = prepared("32")
    step(engine, factor=torch.tensor([1e-6]))
    exact = [after - old for old, after in zip(before, weights(task), strict=True)]
    assert exact[0].abs().max() > 0
    for ours, right in zip(scaled, exact, strict=True):
        assert torch.allclose(ours, right, rtol=0.1, atol=2e-8)


def test_a_loss_that_is_not_finite_is_no_overflow_and_is_told() -> None:
    engine, _ = prepared("16-mixed")
    step(engine)
    with pytest.raises(NonFiniteError, match=r"NaN or infinite at update 1 on rank 0: 'loss'"):
        step(engine, factor=torch.tensor([torch.nan]))


# What is refused.


@pytest.mark.parametrize("make", [lambda name: Trainer(precision=name), lambda name: Engine("cpu", name)])
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("bf16", "Here it is called 'bf16-mixed'"),
        ("16-mix", "Did you mean '16-mixed'"),
        ("BF16-MIXED", "Did you mean 'bf16-mixed'"),
        (16, "unknown precision '16'"),
        ("float8", "Here it is called 'fp8'. Allowed: '16-mixed', '16-true', '16-true-master', "),
        (None, "unknown precision 'None'"),
    ],
)
def test_an_unknown_precision_is_refused_at_construction(make: Any, wrong: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        make(wrong)


@pytest.mark.parametrize(("spec", "name"), [(32, "32"), (64, "64"), ("32", "32")])
def test_a_number_of_bits_is_a_name(spec: int | str, name: str) -> None:
    assert as_precision(spec) is PRECISIONS[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_dtype": torch.float64}, "parameters in torch.float32 cannot compute in torch.float64"),
        (
            {"param_dtype": torch.bfloat16, "compute_dtype": torch.float16},
            "parameters in torch.bfloat16 cannot compute in torch.float16",
        ),
        ({"param_dtype": torch.float64, "compute_dtype": torch.float32}, "give the same dtype for both"),
        ({"compute_dtype": torch.int8}, "torch.int8 is not a floating-point dtype"),
        ({"param_dtype": torch.complex64}, "torch.complex64 is not a floating-point dtype"),
        ({"loss_scaling": True}, "not parameters in torch.float32 and compute in torch.float32"),
        ({"compute_dtype": torch.bfloat16, "loss_scaling": True}, "and compute in torch.bfloat16"),
        (
            {"param_dtype": torch.float16, "compute_dtype": torch.float16, "loss_scaling": True},
            "needs parameters in float32 and compute in float16, not parameters in torch.float16",
        ),
    ],
)
def test_a_pair_that_cannot_work_is_refused_at_construction(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"precision 'mine': .*{message}"):
        Precision("mine", **arguments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("32", "32 (parameters float32, compute float32)"),
        ("bf16-mixed", "bf16-mixed (parameters float32, compute bfloat16)"),
        ("16-true", "16-true (parameters float16, compute float16)"),
    ],
)
def test_a_precision_says_what_it_is(name: str, text: str) -> None:
    assert str(as_precision(name)) == text


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("32", ("float32", "float32", "float32", "float32")),
        ("bf16-mixed", ("float32", "bfloat16", "float32", "float32")),
        ("bf16-true", ("bfloat16", "bfloat16", "bfloat16", "float32")),
        ("bf16-true-nearest", ("bfloat16", "bfloat16", "bfloat16", "bfloat16")),
        ("16-true-master", ("float16", "float16", "float16", "float32, with the weights in float32")),
        ("64", ("float64", "float64", "float64", "float64")),
        ("tf32", ("float32", "tf32", "float32", "float32")),
    ],
)
def test_what_is_kept_and_computed_in_what_is_data(name: str, dtypes: tuple[str, ...]) -> None:
    assert tuple(as_precision(name).dtypes) == dtypes


def test_no_context_is_entered_where_none_is_needed() -> None:
    assert as_precision("32").forward_context(CPU) is None
