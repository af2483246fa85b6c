"""The contract: what a strategy from elsewhere must bring, and what it gets from the base."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain import ConfigError, StrategyError
from drivetrain.strategies import Prepared, Strategy, Support
from drivetrain.strategies.base import MakeOptimizers
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.optimizer_step import step
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.task import StepModule


class Minimal(Strategy):
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
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        self.asked.append("backward")
        (loss if factor is None else loss * factor).backward(inputs=inputs)

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


def test_strategy_is_asked_in_the_order_of_the_step_and_stores_nothing_by_default() -> None:
    strategy = Minimal()
    options = {"max_steps": 1, "max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    quiet(**options, strategy=strategy).fit(Regression(), pairs(4))
    asked = strategy.asked[: strategy.asked.index("teardown") + 1]
    of_step = ["backward", "backward", "clip_grad_norm", "optimizer_step"]
    assert asked == ["setup", "prepare", *of_step, "teardown"]
    assert strategy.state_dict() == {}
    strategy.load_state_dict({"scaler": {"scale": 1.0}})
    assert (strategy.rank, strategy.world_size) == (0, 1)


def test_a_strategy_refuses_what_its_tables_say_and_by_default_what_it_has_to_declare() -> None:
    class Named(Minimal):
        refusals = {"compile": "it traces steps itself", "skipping": ""}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.refusals = {"averages": "of this option"}

    found = {name: Named().refuses(name) for name in ("compile", "skipping", "averages", "generators")}
    assert found == {
        "compile": "it traces steps itself",
        "skipping": "",
        "averages": "of this option",
        "generators": "",
    }
    assert str(Named()) == Named.name
    assert Named().refuses("unfreezing").startswith("it does not declare")
    with pytest.raises(ConfigError, match="Did you mean 'unfreezing'"):
        type("Wrong", (Minimal,), {"refusals": {"unfrezing": ""}})
    with pytest.raises(StrategyError, match=r"compile=True with strategy '.*': it traces steps itself"):
        quiet(strategy=Named(), compile=True)


def test_unsupported_precision_is_refused_with_the_strategys_reason() -> None:
    with pytest.raises(StrategyError, match="precision 'bf16-mixed' cannot run on cpu: it knows no other"):
        quiet(strategy=Minimal(), precision="bf16-mixed")


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(1))  # type: ignore[assignment]


def test_lazy_modules_need_their_sizes_before_a_run() -> None:
    told = r"'line\.1\.weight' of Lazy has no shape yet, .* call the task with"
    runs = [quiet(max_epochs=1).fit, quiet(max_epochs=1, precision="bf16-true").fit, quiet(max_epochs=1).plan]
    for run in (*runs, lambda task, _: FSDP().prepare(StepModule(task), None, as_precision("32"))):
        with pytest.raises(StrategyError, match=told):
            run(Lazy(), pairs())


def with_gradient() -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
    parameter.grad = torch.tensor([[0.5, 0.25], [-1.0, 2.0]])
    return parameter


def stepped() -> Optimizer:
    return torch.optim.SGD([with_gradient()], lr=0.1)


def test_optimizer_step_is_the_optimizers_own() -> None:
    for options in ({"fused": True}, {}):
        ours, theirs = with_gradient(), with_gradient()
        first, second = (torch.optim.AdamW([each], lr=0.1, **options) for each in (ours, theirs))
        for _ in range(3):
            step(first)
            second.step()
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, with_gradient())

    class Sign(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign())

    parameter = with_gradient()
    step(Sign([parameter]))
    assert parameter.tolist() == [[0.0, -3.0], [4.0, -0.5]]


def test_optimizer_step_is_noticed_by_hooks_profiler_and_scheduler() -> None:
    heard: list[object] = []
    for each in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = stepped()
        getattr(optimizer, each)(lambda optimizer, *_: heard.append(optimizer))
        step(optimizer)
        assert heard.pop() is optimizer
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        optimizer = stepped()
        handle = register(lambda optimizer, *_: heard.append(optimizer))
        try:
            step(optimizer)
        finally:
            handle.remove()
        assert heard.pop() is optimizer
    with torch.autograd.profiler.profile() as profile:
        step(optimizer)
    assert any(event.name == "Optimizer.step#SGD.step" for event in profile.function_events)
    optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(optimizer)
    scheduler.step()  # which warns, and here warnings are errors, of a step before the optimizer's
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.step = lambda closure=None: heard.append("replaced")  # type: ignore[method-assign]
    step(optimizer)
    assert heard == ["replaced"]
