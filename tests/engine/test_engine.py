"""The engine: what one step costs and does, generator steps, evaluations in another precision."""

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Duel, Regression, duels, pairs, quiet, variant
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import ConfigError, DataError, Engine, LambdaCallback, OptimizerConfig, StrategyError

PACKAGE = str(Path(drivetrain.__file__).parent)


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


class CountCalls:  # counts the Python calls of our functions, from one `cut` to the next
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.by_step: list[list[str]] = []

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        # `TaskModule.__getattr__` counts where our code calls it. A user's code that names a submodule calls
        # it in place of torch's, at the same cost.
        name = frame.f_code.co_name
        if event == "call" and is_ours(frame) and (name != "__getattr__" or is_ours(frame.f_back)):
            self.calls.append(name)

    def cut(self, *_: Any) -> None:
        self.by_step.append(self.calls)
        self.calls = []

    def steady(self, call: Any, first: int, last: int | None) -> list[str]:
        """The calls between two cuts, which must be the same from the `first` to the `last`."""
        before = sys.getprofile()
        try:
            sys.setprofile(self.profile)
            call()
        finally:
            sys.setprofile(before)
        steady = self.by_step[first:last]
        assert len(steady) >= 4
        assert all(calls == steady[0] for calls in steady), "a steady step does the same each time"
        return steady[0]


def calls_in_a_steady_step(data: Any, **options: Any) -> list[str]:
    """Our calls from one call of the user's step to the next, in the middle of an epoch."""
    counter = CountCalls()

    class Counted(Regression):
        def training_step(self, batch: Any) -> Tensor:
            counter.cut()
            return F.mse_loss(self.line(batch[0]), batch[1])

    trainer = quiet(max_epochs=1, log_every=None, validate_every=None, **options)
    return counter.steady(lambda: trainer.fit(Counted(), data), 3, -1)


def test_a_steady_step_makes_few_calls_of_our_functions() -> None:
    in_memory = calls_in_a_steady_step(list(pairs(20)))
    assert len(in_memory) == 20, in_memory
    from_a_loader = calls_in_a_steady_step(pairs(20))
    assert len(from_a_loader) == 23, from_a_loader
    idle = [drivetrain.Callback() for _ in range(50)]  # idle callbacks cost no call
    assert calls_in_a_steady_step(list(pairs(20)), callbacks=idle) == in_memory


@pytest.mark.parametrize(("verb", "expected"), [("validate", 12), ("predict", 11)])
def test_validate_and_predict_make_few_calls_of_our_functions(verb: str, expected: int) -> None:
    counter = CountCalls()

    class Counted(Regression):
        def forward(self, x: Tensor) -> Any:
            counter.cut()
            return super().forward(x)

    steady = counter.steady(lambda: getattr(quiet(), verb)(Counted(), list(pairs(20))), 2, None)
    assert len(counter.by_step) == 10
    assert len(steady) == expected, steady


def loader(count: int = 8, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(duels(count), batch_size=batch_size)


def test_each_of_several_optimizers_has_its_own_limit_of_the_norm() -> None:
    limits = {"discriminator": 1e-3, "generator": 1e-2}
    task = Duel({name: OptimizerConfig("sgd", lr=1.0, max_grad_norm=norm) for name, norm in limits.items()})
    before = {name: each.detach().clone() for name, each in task.named_parameters()}
    quiet(max_steps=1).fit(task, loader())
    for owner, limit in limits.items():
        moved = [each.detach() - before[name] for name, each in task.named_parameters() if owner in name]
        assert nn.utils.get_total_norm(moved) == pytest.approx(limit, rel=1e-3)


def test_only_the_named_optimizers_parameters_get_gradients() -> None:
    seen: list[dict[str, bool]] = []

    class Both(Duel):
        def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
            for name in ("discriminator", "generator"):
                yield name, self._judged(self.generator(batch["noise"]), 1.0)

    task = Both()

    def look(run: Any) -> None:
        seen.append({name: each.grad is not None for name, each in task.named_parameters()})

    quiet(max_steps=1, callbacks=[LambdaCallback(on_before_optimizer_step=look)]).fit(task, loader(2, 2))
    for owner, gradients in zip(("discriminator", "generator"), seen, strict=True):
        assert gradients == {name: name.startswith(owner) for name in gradients}
    assert all(each.grad is None for each in task.parameters())


def test_each_yield_is_a_step_and_the_body_goes_on_with_the_new_weights() -> None:
    """Compared with the same steps written by hand."""
    data, task, hand = list(loader()), Duel(), Duel()
    result = quiet(max_epochs=1).fit(task, data, data)
    assert result.progress.steps == 2  # one for each batch, whatever the number of optimizers
    names = {"train/discriminator_loss", "train/generator_loss", "train/spread", "validation/loss"}
    assert set(result.metrics) == names
    first = torch.optim.SGD(hand.discriminator.parameters(), lr=0.1)
    second = torch.optim.AdamW(hand.generator.parameters(), lr=0.01, weight_decay=0.0)
    for batch in data:
        fake = hand.generator(batch["noise"])
        loss = hand._judged(batch["real"], 1.0) + hand._judged(fake.detach(), 0.0)
        first.zero_grad()
        loss.backward()
        first.step()
        second.zero_grad()
        hand._judged(fake, 1.0).backward()
        second.step()
    for name, value in task.state_dict().items():
        assert torch.allclose(value, hand.state_dict()[name], rtol=1e-5, atol=1e-6), name


def test_evaluation_draws_by_the_number_of_its_batch_and_not_by_what_ran_before() -> None:
    seen: list[float] = []
    note = LambdaCallback(on_log=lambda run: seen.extend(v for k, v in run.logged.items() if k[:3] == "val"))
    task = variant(validation_step=lambda self, batch: {"loss": torch.rand(())})()
    quiet(max_epochs=2, callbacks=[note]).fit(task, pairs(), pairs(4))
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_refusals_of_the_engine() -> None:
    def fit(returned: Any = None, tokens: Any = None, verb: str = "fit", **options: Any) -> Any:
        def step(task: Regression, batch: Any) -> Any:
            loss = F.mse_loss(task(batch[0]), batch[1])
            return loss if returned is None else returned(loss)

        own: Any = {"training_step": step, "validation_step": step}
        task = variant(**own, **({} if tokens is None else {"tokens": lambda self, batch: tokens}))()
        return lambda: getattr(quiet(max_steps=1, **options), verb)(task, pairs())

    word, help_ = "the value 'loss' that a step returned is complex", ".abs()"
    accumulated: Any = {"gradient_accumulation_steps": 2}
    cases: dict[str, tuple[Any, ...]] = {
        "a complex loss": (fit(lambda loss: loss * 1j), word, help_),
        "accumulated": (fit(lambda loss: {"loss": loss * 1j, "more": loss}, **accumulated), word, help_),
        "evaluated": (fit(lambda loss: loss * 1j, verb="validate"), word, help_),
        "a complex value": (fit(lambda loss: {"loss": loss, "more": loss * 1j}), "'more'", "complex64"),
        **{
            f"tokens {each!r}": (fit(tokens=each), f"tokens gave {each!r}")
            for each in (2.6, -5, math.nan, "7", True)
        },
        "a tensor of tokens": (fit(tokens=torch.ones(2)), "tokens gave a tensor of shape (2,)"),
        "strategy": (lambda: Engine("cpuu"), "Did you mean 'cpu'"),
        "two devices": (lambda: Engine("single", devices=2), "on cpu, not 2"),
        "meta": (
            lambda: quiet(max_epochs=1).fit(Regression().to("meta"), pairs()),
            "has no values",
            "'fsdp'",
        ),
    }
    assert_refused((ConfigError, DataError, StrategyError), cases)
