"""The contract: what a strategy from elsewhere must bring, and what it gets from the base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain import Engine, OptimizerConfig, StrategyError
from drivetrain.strategies import Prepared, Strategy, Support
from drivetrain.strategies.base import MakeOptimizers
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.task import StepModule


class Minimal(Strategy):
    """Only what is abstract, and a note of what it was asked."""

    name = "minimal"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[str] = []

    def supports(self, precision: Precision) -> Support:
        return Support(precision.name == "32", "it knows no other")

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        self.asked.append("prepare")
        return Prepared(Wrapper(module), make_optimizers(module) if make_optimizers else {})

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        self.asked.append("backward")
        (loss if share is None else loss * share).backward(inputs=inputs)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        self.asked.append("clip_grad_norm")
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        self.asked.append("optimizer_step")
        optimizer.step()
        return True

    def setup(self) -> None:
        self.asked.append("setup")

    def teardown(self) -> None:
        self.asked.append("teardown")


class Wrapper(nn.Module):
    """Stands for DDP and the like: what it wraps must run through its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.module(*arguments)


def test_a_strategy_from_elsewhere_trains_as_ours_does() -> None:
    options = {"max_epochs": 2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    config = OptimizerConfig("adamw", lr=0.1)
    ours, theirs = Regression(config, dropout=0.3), Regression(config, dropout=0.3)
    quiet(**options).fit(ours, pairs(), pairs())
    quiet(**options, strategy=Minimal()).fit(theirs, pairs(), pairs())
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    assert sorted(weights(theirs)) == sorted(weights(ours)), "its wrapper leaves no trace in the names"


def test_a_strategy_is_asked_in_the_order_of_the_step() -> None:
    strategy = Minimal()
    quiet(max_steps=1, max_grad_norm=1.0, gradient_accumulation_steps=2, strategy=strategy).fit(
        Regression(), pairs(4)
    )
    asked = strategy.asked[: strategy.asked.index("teardown") + 1]
    assert asked == [
        "setup", "prepare", "backward", "backward", "clip_grad_norm", "optimizer_step", "teardown",
    ]  # fmt: skip


def test_a_generator_step_runs_through_the_wrapper_too() -> None:
    data = DataLoader(duels(6), batch_size=3)  # type: ignore[arg-type]
    ours, theirs = Duel(), Duel()
    quiet(max_epochs=1).fit(ours, data)
    quiet(max_epochs=1, strategy=Minimal()).fit(theirs, data)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value)


def test_every_step_runs_through_the_wrapper() -> None:
    engine = Engine(Minimal())
    task = Regression()
    engine.prepare_task(task)
    assert isinstance(engine.model, Wrapper)
    for micro_batch in engine.prepare_data(pairs(6)):
        engine.model(micro_batch)
    assert engine.model.calls == 3


def test_what_a_strategy_does_not_support_is_refused_at_construction_with_its_reason() -> None:
    with pytest.raises(StrategyError, match="precision 'bf16-mixed' cannot run on cpu: it knows no other"):
        quiet(strategy=Minimal(), precision="bf16-mixed")


def test_a_strategy_that_lacks_a_method_cannot_be_made() -> None:
    class Half(Strategy):
        def supports(self, precision: Precision) -> Support:
            return Support(True)

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_a_strategy_without_a_state_of_its_own_stores_none_and_takes_any() -> None:
    strategy = Minimal()
    assert strategy.state_dict() == {}
    strategy.load_state_dict({"scaler": {"scale": 1.0}})
    data = pairs()
    assert strategy.prepare_data(data) is data
    assert (strategy.rank, strategy.world_size) == (0, 1)


def test_support_is_true_or_false_and_says_why() -> None:
    assert Support(True)
    assert not Support(False, "because")
    assert Support(False, "because").reason == "because"


def test_an_only_optimizer_can_be_asked_for_whatever_its_name() -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    first, second = (torch.optim.SGD(parameters, lr=0.1) for _ in range(2))
    assert Prepared(nn.Identity(), {"any": first}).optimizer is first
    with pytest.raises(ValueError, match="unpack"):
        _ = Prepared(nn.Identity(), {"a": first, "b": second}).optimizer


class Lazy(Regression):
    """Learns its sizes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(1))  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_sizes_that_the_first_batch_would_tell_are_asked_for_before_several_processes_begin(
    kind: Any,
) -> None:
    told = r"'line\.1\.weight' of Lazy has no shape yet, .* strategy '(ddp|fsdp)' needs .* call the task with"
    with pytest.raises(StrategyError, match=told):
        kind().prepare(StepModule(Lazy()), None, as_precision("32"))


@pytest.mark.parametrize("precision", ["32", "bf16-true", "16-mixed"])
def test_one_process_learns_sizes_from_the_first_batch(precision: str) -> None:
    task = Lazy()
    quiet(max_epochs=1, precision=precision, max_grad_norm=1.0).fit(task, pairs())
    assert task.line[1].weight.shape == (1, 4)  # type: ignore[index]
