"""The engine: what one update costs and does, what its steps may return, generator steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.host_syncs import HostSyncs
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import drivetrain
from drivetrain import (
    Callback,
    ConfigError,
    Engine,
    LambdaCallback,
    OptimizerConfig,
    StepOutput,
    StrategyError,
)

PACKAGE = str(Path(drivetrain.__file__).parent)

# Budgets: exact counts.


def our_frames(frame: FrameType | None) -> list[str]:
    """The functions of ours on the stack below a frame, the innermost first."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_few_of_our_frames_stand_between_fit_and_the_users_step() -> None:
    seen: list[list[str]] = []

    class Looking(Regression):
        def training_step(self, batch: Any) -> Tensor:
            seen.append(our_frames(sys._getframe()))
            return super().loss(self(batch[0]), batch)

    quiet(max_steps=2).fit(Looking(), pairs())
    assert seen[-1] == ["accumulate", "train_step", "train_steps", "fit", "checked"]


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def is_our_call(frame: FrameType, event: str) -> bool:
    """Whether a function of ours is called.

    `TaskModule.__getattr__` counts where our code calls it. A user's code that names a submodule calls it in
    place of torch's, at the same cost.
    """
    ours = event == "call" and is_ours(frame)
    return ours and (frame.f_code.co_name != "__getattr__" or is_ours(frame.f_back))


class CountCalls:
    """Counts the Python calls of our functions between the ends of two updates."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.by_update: list[list[str]] = []

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if is_our_call(frame, event):
            self.calls.append(frame.f_code.co_name)

    def cut(self) -> None:
        self.by_update.append(self.calls)
        self.calls = []


def calls_in_a_steady_step(data: Any, **options: Any) -> list[str]:
    """Our calls from one call of the user's loss to the next, in the middle of an epoch."""
    counter = CountCalls()

    class Counted(Regression):
        def training_step(self, batch: Any) -> Tensor:
            counter.cut()
            return F.mse_loss(self.line(batch[0]), batch[1])

    before = sys.getprofile()
    try:
        sys.setprofile(counter.profile)
        quiet(max_epochs=1, log_every=None, validate_every=None, **options).fit(Counted(), data)
    finally:
        sys.setprofile(before)
    steady = counter.by_update[3:-1]
    assert len(steady) >= 4
    assert all(calls == steady[0] for calls in steady), "a steady step does the same each time"
    return steady[0]


def test_a_bare_steady_step_makes_few_calls_of_our_functions() -> None:
    in_memory = calls_in_a_steady_step(list(pairs(20)))
    assert len(in_memory) == 18, in_memory
    from_a_loader = calls_in_a_steady_step(pairs(20))
    assert len(from_a_loader) == 21, from_a_loader


@pytest.mark.parametrize(("verb", "expected"), [("validate", 9), ("predict", 8)])
def test_a_batch_that_is_not_trained_on_makes_few_calls_of_our_functions(verb: str, expected: int) -> None:
    """From one call of the user's forward to the next, with what picks the columns and seeds the stream."""
    counter = CountCalls()

    class Counted(Regression):
        def forward(self, x: Tensor) -> Any:
            counter.cut()
            return super().forward(x)

    data = list(pairs(20))
    before = sys.getprofile()
    try:
        sys.setprofile(counter.profile)
        getattr(quiet(), verb)(Counted(), data)
    finally:
        sys.setprofile(before)
    steady = counter.by_update[2:]
    assert len(steady) == 8
    assert all(calls == steady[0] for calls in steady), "a steady batch does the same each time"
    assert len(steady[0]) == expected, steady[0]


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of a user's own, which may draw from the host's generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index / 40), torch.tensor([(index / 40) ** 2])


def test_the_default_step_over_a_dataset_of_ones_own_makes_few_calls_too() -> None:
    counts: list[int] = []

    class Counting(Callback):
        def on_step_end(self, run: Any) -> None:
            counts.append(0)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if counts and is_our_call(frame, event):
            counts[-1] += 1

    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        trainer = quiet(max_epochs=1, log_every=None, validate_every=None, callbacks=[Counting()])
        trainer.fit(Regression(), DataLoader(Squares(), batch_size=2, shuffle=True))
    finally:
        sys.setprofile(before)
    assert len(counts) == 20
    assert set(counts[2:-1]) == {25}, counts


def test_idle_callbacks_cost_no_call() -> None:
    data = list(pairs(20))
    assert calls_in_a_steady_step(data, callbacks=[drivetrain.Callback() for _ in range(50)]) == (
        calls_in_a_steady_step(data)
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_no_steady_step_waits_for_the_device(accumulation: int, optimizer: str, schedule: str) -> None:
    trainer = quiet(
        max_epochs=1, max_grad_norm=1.0, gradient_accumulation_steps=accumulation, log_every="9 steps"
    )
    task = Regression(OptimizerConfig(optimizer, lr=0.1, schedule=schedule), dropout=0.5)
    steps = trainer.steps(task, pairs(60))
    next(steps), next(steps)
    with HostSyncs() as mode:
        next(steps), next(steps), next(steps)
        assert mode.reads == []
        torch.ones(()).item()  # the detector works
        assert mode.reads == ["_local_scalar_dense"]
    steps.close()


def test_a_step_with_many_values_waits_for_the_device_once_at_the_log_point() -> None:
    class Many(Regression):
        def training_step(self, batch: Any) -> dict[str, Any]:
            loss = self.loss(self(batch[0]), batch)
            return {"loss": loss, **{f"value_{number}": loss * number for number in range(30)}}

    steps = quiet(max_epochs=1, log_every="4 steps").steps(Many(), pairs(40))
    next(steps)
    with HostSyncs() as mode:
        for _ in range(3):
            next(steps)
        before = len(mode.reads)
        next(steps)  # the log point of the fourth update stands before the fifth
    steps.close()
    assert before == 0
    assert len(mode.reads) <= 31  # one copy, read as so many numbers on the CPU


# Generator steps.


def test_only_the_named_optimizers_parameters_get_gradients() -> None:
    seen: list[dict[str, bool]] = []

    class Both(Duel):
        """Both losses reach both networks."""

        def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
            for name in ("discriminator", "generator"):
                yield name, self._judged(self.generator(batch["noise"]), 1.0)

    task = Both()

    def look(run: Any) -> None:
        seen.append({name: each.grad is not None for name, each in task.named_parameters()})

    trainer = quiet(max_steps=1, callbacks=[LambdaCallback(on_before_optimizer_step=look)])
    trainer.fit(task, DataLoader(duels(2), batch_size=2))  # type: ignore[arg-type]
    for owner, gradients in zip(("discriminator", "generator"), seen, strict=True):
        assert gradients == {name: name.startswith(owner) for name in gradients}
    assert all(each.grad is None for each in task.parameters())


def test_each_yield_is_an_update_and_the_body_goes_on_with_the_new_weights() -> None:
    """Compared with the same updates written by hand."""
    data = list(DataLoader(duels(8), batch_size=4))  # type: ignore[arg-type]
    task = Duel()
    result = quiet(max_epochs=1).fit(task, data)
    assert result.progress.updates == 2  # one for each batch, whatever the number of optimizers

    hand = Duel()
    first = torch.optim.SGD(hand.discriminator.parameters(), lr=0.1)
    second = torch.optim.AdamW(
        [
            {"params": [hand.generator.weight], "weight_decay": 0.0},
            {"params": [hand.generator.bias], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
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


def test_losses_are_logged_by_their_optimizers_and_returned_values_by_their_names() -> None:
    names = ("train/discriminator_loss", "train/generator_loss", "train/spread", "validation/loss")
    loader = DataLoader(duels(8), batch_size=4)  # type: ignore[arg-type]
    result = quiet(max_epochs=1).fit(Duel(), loader, loader)
    assert set(result.metrics) == {*names}


def test_optimizers_have_their_own_schedules_and_clipping() -> None:
    task = Duel(
        {
            "discriminator": OptimizerConfig("sgd", lr=1.0, max_grad_norm=1e-3),
            "generator": OptimizerConfig("sgd", lr=1.0, schedule="linear"),
        }
    )
    rates: list[dict[str, float]] = []
    moves: list[float] = []
    before = {name: each.detach().clone() for name, each in task.named_parameters()}

    def look(run: Any) -> None:
        rates.append(run.learning_rates())
        if len(rates) == 1:
            for name in ("discriminator.weight", "generator.weight"):
                moves.append(float((task.get_parameter(name).detach() - before[name]).norm()))

    loader = DataLoader(duels(8), batch_size=4)  # type: ignore[arg-type]
    quiet(max_epochs=1, callbacks=[LambdaCallback(on_step_end=look)]).fit(task, loader)
    assert rates == [
        {"lr/discriminator": 1.0, "lr/generator": 0.5},
        {"lr/discriminator": 1.0, "lr/generator": 0.0},
    ]
    discriminator, generator = moves
    assert discriminator <= 1e-3 * 1.001
    assert generator > 1e-3


class Yielding(Duel):
    """Yields what it is given."""

    def __init__(self, *yielded: Callable[[Duel, Any], Any]) -> None:
        super().__init__()
        self.yielded = yielded

    def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        for each in self.yielded:
            yield each(self, batch)


def discriminator_loss(task: Duel, batch: Mapping[str, Tensor]) -> Tensor:
    return task._judged(batch["real"], 1.0)


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        (
            lambda task, batch: ("discriminater", discriminator_loss(task, batch)),
            "Did you mean 'discriminator'",
        ),
        (lambda task, batch: discriminator_loss(task, batch), "must yield an optimizer's name and its loss"),
        (lambda task, batch: ("discriminator", None), "returned no loss"),
        (lambda task, batch: ("discriminator", {"los": 1}), "mapping without 'loss'"),
        (lambda task, batch: ("discriminator", batch["real"]), r"'loss'.*shape \(4, 4\)"),
    ],
    ids=["unknown name", "no name", "no loss", "misspelt loss", "no scalar"],
)
def test_a_wrong_yield_is_an_error_that_says_how_it_should_be(yielded: Any, message: str) -> None:
    loader = DataLoader(duels(4), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        quiet(max_steps=1).fit(Yielding(yielded), loader)


def test_micro_batches_that_yield_differently_are_refused() -> None:
    class Uneven(Duel):
        def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
            for _ in range(len(batch["real"])):
                yield "discriminator", discriminator_loss(self, batch)

    loader = DataLoader(duels(5), batch_size=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="same number of times"):
        quiet(max_steps=1, gradient_accumulation_steps=2).fit(Uneven(), loader)


def test_several_optimizers_need_a_generator_step() -> None:
    class Forgetful(Duel):
        def training_step(self, batch: Mapping[str, Tensor]) -> Any:
            return discriminator_loss(self, batch)

    with pytest.raises(ConfigError, match=r"2 optimizers.*is no generator"):
        quiet(max_steps=1).fit(Forgetful(), DataLoader(duels(4), batch_size=4))  # type: ignore[arg-type]


# What a step may return.


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: loss.reshape(1),
        lambda loss: {"loss": loss, "extra": 1.5},
        lambda loss: StepOutput(loss),
        lambda loss: StepOutput({"loss": loss, "extra": loss.detach()}, outputs=loss),
        lambda loss: StepOutput(loss, metrics={"extra": 2}),
    ],
)
def test_a_step_may_return_a_loss_in_several_forms(wrap: Callable[[Tensor], Any]) -> None:
    class Wrapping(Regression):
        def training_step(self, batch: Any) -> Any:
            return wrap(self.loss(self(batch[0]), batch))

    task, plain = Wrapping(), Regression()
    metrics = quiet(max_epochs=1).fit(task, pairs()).metrics
    assert metrics["train/loss"] == quiet(max_epochs=1).fit(plain, pairs()).metrics["train/loss"]
    assert weights(task) == weights(plain)


@pytest.mark.parametrize("returned", [None, "a text", {"los": torch.ones(())}, torch.ones(3)])
def test_a_step_that_returns_no_loss_is_an_error(returned: Any) -> None:
    class Wrong(Regression):
        def training_step(self, batch: Any) -> Any:
            return returned

    with pytest.raises(ConfigError, match=r"loss|scalar"):
        quiet(max_steps=1).fit(Wrong(), pairs())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": "cpuu"}, ConfigError, "Did you mean 'cpu'"),
        ({"precision": "bf16"}, ConfigError, "Here it is called 'bf16-mixed'"),
        ({"strategy": "single", "devices": 2}, StrategyError, "devices=2"),
        ({"devices": 0}, StrategyError, "positive"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(**arguments)
